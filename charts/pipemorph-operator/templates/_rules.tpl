{{/* What the operator does with jobs and their children. It never reads a Secret. */}}
{{- define "pipemorph.operatorRules" -}}
- apiGroups: [pipemorph.io]
  resources: [pipemorphjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [pipemorph.io]
  resources: [pipemorphjobs/status]
  verbs: [patch]
# For blockOwnerDeletion in owner references, where the admission plugin guards it.
- apiGroups: [pipemorph.io]
  resources: [pipemorphjobs/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
# Server-side apply of an object that does not exist yet needs create beside patch.
- apiGroups: [""]
  resources: [services]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [configmaps, secrets]
  verbs: [create, delete]
{{- if .Values.networkPolicy.jobs.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create]
{{- end }}
# A lost pod loses its finalizer, so that the Job makes another one at once; one on a lost node is
# deleted.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
# Those of an attempt's Job and pods say why these are not made or do not start. One that is emitted
# again is counted up.
- apiGroups: [""]
  resources: [events]
  verbs: [create, list, patch]
{{- if .Values.rbac.volcano }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [create, patch]
{{- end }}
{{- if .Values.rbac.coscheduling }}
- apiGroups: [scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [create, patch]
{{- end }}
{{- end -}}

{{/* What the ingest does: follow jobs, write its part of their status and their events, look
     up the callers' pods. */}}
{{- define "pipemorph.ingestRules" -}}
- apiGroups: [pipemorph.io]
  resources: [pipemorphjobs]
  verbs: [get, list, watch]
- apiGroups: [pipemorph.io]
  resources: [pipemorphjobs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
