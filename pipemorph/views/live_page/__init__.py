"""Live page of a running job: its newest iteration, and the same under the initial plan.

``page_document`` has the models of the page's JSON, ``page_builder`` makes a document from a host's
view of the job, ``document_cache`` renders and caches it; hosts serve both.
"""
