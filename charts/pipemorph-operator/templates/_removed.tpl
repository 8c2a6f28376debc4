{{/* Rejects values that an earlier version accepted, naming the value and its replacement. */}}
{{- define "pipemorph.refuseRemovedValues" -}}
{{- $removed := dict
  "fabric" "nodes that several jobs accuse get an event and a metric; a Prometheus alert replaces the taint"
  "networkPolicy.watchFrom" "nothing is needed: pipemorph watch reaches the pod by kubectl port-forward"
  "watch" "grant get of Secrets and create of pods/portforward to users who may watch"
}}
{{- range $path, $replacement := $removed }}
{{- $found := $.Values }}
{{- $given := true }}
{{- range $key := splitList "." $path }}
{{- if and $given (kindIs "map" $found) (hasKey $found $key) }}
{{- $found = get $found $key }}
{{- else }}
{{- $given = false }}
{{- end }}
{{- end }}
{{- if $given }}
{{- fail (printf "%s: was removed; %s" $path $replacement) }}
{{- end }}
{{- end }}
{{- end -}}
