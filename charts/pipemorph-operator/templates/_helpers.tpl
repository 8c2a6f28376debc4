{{- define "pipemorph.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pipemorph.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pipemorph.labels" -}}
{{ include "pipemorph.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: pipemorph
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "pipemorph.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pipemorph.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed without serviceAccount.create" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "pipemorph.image" -}}
{{- $image := .Values.image -}}
{{- if contains "@" $image.repository -}}
{{- if or $image.tag $image.digest -}}
{{- fail (printf "image.repository is %s, which has a digest; expected empty image.tag and image.digest" $image.repository) -}}
{{- end -}}
{{ $image.repository }}
{{- else if $image.digest -}}
{{ $image.repository }}{{ with $image.tag }}:{{ . }}{{ end }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{- define "pipemorph.ingestService" -}}
{{ include "pipemorph.fullname" . }}-ingest
{{- end -}}

{{- /* Label selector of the ingest's pods. */}}
{{- define "pipemorph.ingestPods" -}}
app.kubernetes.io/name={{ default .Chart.Name .Values.nameOverride }},app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=ingest
{{- end -}}

{{- define "pipemorph.tlsSecret" -}}
{{- default (printf "%s-tls" (include "pipemorph.ingestService" .)) .Values.ingest.tls.existingSecret -}}
{{- end -}}

{{- define "pipemorph.ingestUrl" -}}
https://{{ include "pipemorph.ingestService" . }}.{{ .Release.Namespace }}.svc:{{ .Values.ingest.port }}
{{- end -}}

{{- define "pipemorph.podCommon" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
tolerations:
{{- /* Kubernetes adds tolerations of 300 s by default. */}}
{{- range $taint := list "not-ready" "unreachable" }}
- {key: node.kubernetes.io/{{ $taint }}, operator: Exists, effect: NoExecute, tolerationSeconds: {{ $.Values.lostNodeSeconds | int }}}
{{- end }}
{{- with .Values.tolerations }}
{{ toYaml . }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
enableServiceLinks: false
terminationGracePeriodSeconds: 20
{{- end -}}

{{- /* An authority and a certificate that it has signed, as JSON: ca, crt, key. Authorities have different
names, because clients find them by name. Keys use the curve P-256: its handshake takes a tenth of the
processor time of RSA, and after a restart all agents connect at once. */}}
{{- define "pipemorph.newCertificate" -}}
{{- $names := index . 1 }}
{{- $ca := genCAWithKey (printf "%s-ca-%s" (index . 0) (randAlphaNum 6 | lower)) 3650 (genPrivateKey "ecdsa") }}
{{- $cert := genSignedCertWithKey (first $names) nil $names 3650 $ca (genPrivateKey "ecdsa") }}
{{- dict "ca" $ca.Cert "crt" $cert.Cert "key" $cert.Key | toJson }}
{{- end -}}

{{- /* Spreads the replicas of a component over nodes and zones, if possible. */}}
{{- define "pipemorph.topologySpread" -}}
{{- $root := index . 0 }}
topologySpreadConstraints:
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "pipemorph.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ index $ 1 }}
  matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end -}}

{{- /* Lets a drain of nodes evict only one replica at a time. */}}
{{- define "pipemorph.disruptionBudget" -}}
{{- $root := index . 0 }}
{{- $component := index . 1 }}
{{- if gt (int (index $root.Values $component).replicas) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ index . 2 }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "pipemorph.labels" $root | nindent 4 }}
spec:
  maxUnavailable: 1
  # An unready replica, such as one that the API server refuses, does not block a drain.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "pipemorph.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $component }}
{{- end }}
{{- end -}}

{{- define "pipemorph.probes" -}}
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  failureThreshold: 6
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{- /* Annotations of an alert: the page that says what to do, and its address if there is one. */}}
{{- define "pipemorph.runbook" -}}
{{- $page := index . 1 -}}
runbook: {{ $page }}
{{- with (index . 0).Values.metrics.alerts.runbooks }}
runbook_url: {{ printf "%s/%s" (trimSuffix "/" .) $page | quote }}
{{- end }}
{{- end -}}
