{{- define "taut.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{- include "taut.metadata" . | nindent 2 }}
spec:
  accessModes: [{{ default .root.Values.modelStore.accessMode .accessMode }}]
  {{- with .storageClass }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources:
    requests: {storage: {{ include "taut.claim.size" . }}}
{{- end }}

{{/* A quantity as a number of bytes. */}}
{{- define "taut.bytes" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $number := trimSuffix $unit $text | float64 -}}
{{- $powers := dict "k" 1000.0 "M" 1000000.0 "G" 1000000000.0 "T" 1000000000000.0 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "P" 1000000000000000.0 "Pi" 1125899906842624.0 -}}
{{- printf "%.0f" (mulf $number (default 1.0 (get $powers $unit))) -}}
{{- end }}

{{/*
What a claim asks for: never less than it does already, which Kubernetes refuses. More only where its StorageClass can give it,
said before anything is changed. Context: {root, name, key, size, released}; `released`: the claim is an object of the release,
which an upgrade changes; one that a hook made is not touched by any.
*/}}
{{- define "taut.claim.size" -}}
{{- $namespace := include "taut.namespace" .root -}}
{{- $live := lookup "v1" "PersistentVolumeClaim" $namespace .name -}}
{{- $have := dig "spec" "resources" "requests" "storage" "" $live -}}
{{- $size := .size -}}
{{- if $have -}}
{{- if le (include "taut.bytes" .size | float64) (include "taut.bytes" $have | float64) -}}
{{- $size = $have -}}
{{- else -}}
{{- $class := dig "spec" "storageClassName" "" $live -}}
{{- $grows := false -}}
{{- with $class -}}{{- $grows = dig "allowVolumeExpansion" false (lookup "storage.k8s.io/v1" "StorageClass" "" $class) -}}{{- end -}}
{{- if not $grows -}}
{{- fail (printf "%s: %s, but the claim %s asks for %s and cannot grow: %s; set %s back, or fill another claim and name it as %s" .key .size .name $have (ternary (printf "its StorageClass %s does not allow expansion" $class) "its volume was made by hand" (not (empty $class))) .key (printf "%s.existingClaim" (trimSuffix ".size" .key))) -}}
{{- else if not .released -}}
{{- fail (printf "%s: %s, but the claim %s asks for %s, and an upgrade does not change a claim that Helm keeps: kubectl -n %s patch pvc %s -p '{\"spec\":{\"resources\":{\"requests\":{\"storage\":%q}}}}'" .key .size .name $have $namespace .name .size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $size -}}
{{- end }}

{{/* What of a claim that is there nobody can change. Context: {root, name, key, storageClass}. */}}
{{- define "taut.claim.check" -}}
{{- $mode := default .root.Values.modelStore.accessMode .accessMode -}}
{{- $live := lookup "v1" "PersistentVolumeClaim" (include "taut.namespace" .root) .name -}}
{{- $modes := dig "spec" "accessModes" list $live -}}
{{- $wanted := default list (get (dict "ReadWriteMany" (list "ReadWriteMany") "ReadOnlyMany" (list "ReadOnlyMany" "ReadWriteMany")) $mode) -}}
{{- $serves := or (not $wanted) (not $modes) -}}
{{- range $wanted -}}{{- if has . $modes -}}{{- $serves = true -}}{{- end -}}{{- end -}}
{{- if not $serves -}}
{{- fail (printf "modelStore.accessMode: %s, but the claim %s has %s, which cannot be changed; use another claim" $mode .name (join ", " $modes)) -}}
{{- end -}}
{{- $class := dig "spec" "storageClassName" "" $live -}}
{{- if and $live .storageClass (ne .storageClass $class) -}}
{{- fail (printf "%s.storageClass: %s, but the claim %s has %q, which cannot be changed; use another claim" .key .storageClass .name $class) -}}
{{- end -}}
{{- end }}
