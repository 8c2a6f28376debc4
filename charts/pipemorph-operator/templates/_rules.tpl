{{/* Rights of the operator on jobs and their objects. It never reads a Secret. */}}
{{- define "pipemorph.operatorRules" -}}
- apiGroups: [pipemorph.io]
  resources: [pipemorphjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [pipemorph.io]
  resources: [pipemorphjobs/status]
  verbs: [patch]
# For blockOwnerDeletion in owner references, if an admission plugin protects it.
- apiGroups: [pipemorph.io]
  resources: [pipemorphjobs/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
# Server-side apply of an object that does not exist yet needs create in addition to patch.
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
# The finalizer of a lost pod is removed, so that the Job replaces it at once; a pod on a lost node
# is deleted.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
# Events of an attempt's Job and pods give reasons why pods are not created or do not start. An event
# that is emitted again increments its count.
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

{{/* Rights of the ingest: follow jobs, write its part of their status and their events, read the
     callers' pods. */}}
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
