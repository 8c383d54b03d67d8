{{/* The second map over the first, key by key; null takes a key away. Context: list of both. */}}
{{- define "taut.merge" -}}
{{- $merged := deepCopy (default dict (first .)) -}}
{{- range $key, $value := default dict (last .) -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $merged $key -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $merged $key)) -}}
{{- $_ := set $merged $key (include "taut.merge" (list (get $merged $key) $value) | fromYaml) -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end }}

{{/* Environment as Kubernetes has it, from its own list or from a map: NAME: text, or NAME: {secretKeyRef: …}. */}}
{{- define "taut.env" -}}
{{- $entries := list -}}
{{- if kindIs "slice" . -}}
{{- $entries = . -}}
{{- else -}}
{{- range $name, $value := default dict . -}}
{{- if kindIs "map" $value -}}
{{- $entries = append $entries (dict "name" $name "valueFrom" $value) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $entries = append $entries (dict "name" $name "value" (toString $value)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $entries -}}
{{- end }}

{{/* The later entry of a name wins, at the place of the first. Context: a list of entries. */}}
{{- define "taut.env.unique" -}}
{{- $at := dict -}}
{{- range $entry := . -}}{{- $_ := set $at $entry.name $entry -}}{{- end -}}
{{- $entries := list -}}
{{- $seen := list -}}
{{- range $entry := . -}}
{{- if not (has $entry.name $seen) -}}
{{- $seen = append $seen $entry.name -}}
{{- $entries = append $entries (get $at $entry.name) -}}
{{- end -}}
{{- end -}}
{{- toYaml $entries -}}
{{- end }}

{{/*
The keys of a pod that several sections give: maps are merged, lists joined, of single values the later one wins.
Context: a list of maps.
*/}}
{{- define "taut.overlay" -}}
{{- $merged := dict -}}
{{- range $layer := . -}}
{{- range $key, $value := default dict $layer -}}
{{- $have := get $merged $key -}}
{{- if eq $key "env" -}}
{{- $_ := set $merged $key (concat (default list $have) (include "taut.env" $value | fromYamlArray)) -}}
{{- else if and (kindIs "slice" $value) (kindIs "slice" $have) -}}
{{- $_ := set $merged $key (concat $have $value) -}}
{{- else if and (kindIs "map" $value) (kindIs "map" $have) -}}
{{- $_ := set $merged $key (include "taut.merge" (list $have $value) | fromYaml) -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end }}

{{/* A probe with what the user gave over it; who gives a handler takes the chart's away. Context: list of both. */}}
{{- define "taut.probe" -}}
{{- $handlers := list "exec" "httpGet" "tcpSocket" "grpc" -}}
{{- $probe := first . -}}
{{- $given := default dict (last .) -}}
{{- range $handlers -}}
{{- if hasKey $given . -}}{{- range $handlers -}}{{- $_ := unset $probe . -}}{{- end -}}{{- end -}}
{{- end -}}
{{- include "taut.merge" (list $probe $given) -}}
{{- end }}
