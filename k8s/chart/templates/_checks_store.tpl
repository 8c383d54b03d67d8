{{/* Where models lie, and who can reach them. Context: the root. */}}
{{- define "taut.checks.store" -}}
{{- $store := .Values.modelStore -}}
{{- $kinds := list -}}
{{- range $key := list "existingClaim" "hostPath" "ephemeral" -}}{{- if get $store $key -}}{{- $kinds = append $kinds $key -}}{{- end -}}{{- end -}}
{{- if kindIs "map" $store.emptyDir -}}{{- $kinds = append $kinds "emptyDir" -}}{{- end -}}
{{- if gt (len $kinds) 1 -}}{{- fail (printf "modelStore: give one of %s" (join ", " $kinds)) -}}{{- end -}}
{{- if eq $store.accessMode "ReadWriteOncePod" -}}
{{- fail "modelStore.accessMode: ReadWriteOncePod lets a single pod mount the volume, and the prepare Job and a new worker each need it beside an old one; use ReadWriteOnce" -}}
{{- end -}}
{{- $through := ternary .Values.validation.through "" .Values.validation.enabled -}}
{{- if eq $store.accessMode "ReadOnlyMany" -}}
{{- if not $store.existingClaim -}}{{- fail "modelStore.existingClaim: needed with accessMode ReadOnlyMany: a claim that somebody filled" -}}{{- end -}}
{{- if .Values.prepare.enabled -}}{{- fail "prepare.enabled: nothing can be written to a store with modelStore.accessMode ReadOnlyMany; set it false" -}}{{- end -}}
{{- if has $through (list "both" "files") -}}{{- fail "validation.through: files writes the verdict into the store, which is ReadOnlyMany; use servers" -}}{{- end -}}
{{- end -}}
{{- if and (ne (include "taut.store.kind" .) "claim") (has $through (list "both" "files")) -}}
{{- fail (printf "validation.through: files loads checkpoints from a claim, and modelStore.%s is each pod's own; use servers" (include "taut.store.kind" .)) -}}
{{- end -}}
{{- if eq (include "taut.prepare.run" .) "pod" -}}
{{- range $key := list "labels" "annotations" "podLabels" "podAnnotations" "podSecurityContext" "containerSecurityContext" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "schedulerName" "runtimeClassName" "hostNetwork" "dnsPolicy" "dnsConfig" "hostAliases" "initContainers" "sidecars" "extraVolumes" "extraVolumeMounts" "resourceClaims" "serviceAccount" "ttlSecondsAfterFinished" -}}
{{- if get $.Values.prepare $key -}}{{- fail (printf "prepare.%s: each worker's own pod prepares (prepare.run: pod, or a store of the pod or node); give it as worker.%s" $key $key) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (has (include "taut.store.kind" .) (list "emptyDir" "ephemeral")) (not .Values.prepare.enabled) (include "taut.store.used" .) -}}
{{- fail (printf "prepare.enabled: modelStore.%s is empty when a worker starts, and nothing else fills it" (include "taut.store.kind" .)) -}}
{{- end -}}
{{- end }}

{{/* Keys that other charts have under another name: the message says what to write here. Context: the root. */}}
{{- define "taut.checks.spellings" -}}
{{- $sections := list (dict "path" "" "kind" "" "values" .Values) -}}
{{- range $path := list "gateway" "worker" "prepare" "validation" "smokeTest" -}}
{{- $sections = append $sections (dict "path" $path "kind" "pod" "values" (get $.Values $path)) -}}
{{- end -}}
{{- range $number, $variant := .Values.variants -}}
{{- $path := printf "variants[%s]" $variant.name -}}
{{- $sections = append $sections (dict "path" $path "kind" "pod" "values" $variant) -}}
{{- $sections = append $sections (dict "path" $path "kind" "variants[]" "values" $variant) -}}
{{- end -}}
{{- $spellings := .Files.Get "files/spellings.yaml" | fromYaml -}}
{{- range $kind, $keys := $spellings -}}
{{- if not (has $kind (list "" "pod" "variants[]")) -}}
{{- $found := $.Values -}}
{{- range splitList "." $kind -}}{{- $found = default dict (get $found .) -}}{{- end -}}
{{- $sections = append $sections (dict "path" $kind "kind" $kind "values" $found) -}}
{{- end -}}
{{- end -}}
{{- range $section := $sections -}}
{{- range $key, $use := get $spellings $section.kind -}}
{{- if hasKey $section.values $key -}}
{{- $path := trimPrefix "." (printf "%s.%s" $section.path $key) -}}
{{- fail (printf "%s: no key of this chart; use %s" $path ($use | replace "HERE" $section.path)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
