"""What a job's reports say: links, stages, rails and transports."""
