{{/* Whether anything lies in the model store. Context: the root. */}}
{{- define "taut.store.used" -}}
{{- $used := or .Values.prepare.enabled .Values.validation.text.path -}}
{{- range .Values.variants -}}{{- if not (or .artifact .urls) -}}{{- $used = true -}}{{- end -}}{{- end -}}
{{- if $used -}}yes{{- end -}}
{{- end }}

{{/* claim, hostPath, emptyDir or ephemeral. Context: the root. */}}
{{- define "taut.store.kind" -}}
{{- $store := .Values.modelStore -}}
{{- if $store.hostPath -}}hostPath{{- else if kindIs "map" $store.emptyDir -}}emptyDir{{- else if $store.ephemeral -}}ephemeral{{- else -}}claim{{- end -}}
{{- end }}

{{- define "taut.store.claim" -}}
{{- default (printf "%s-models" (include "taut.fullname" .)) .Values.modelStore.existingClaim -}}
{{- end }}

{{/* Whether the store is one claim that one node holds at a time. Context: the root. */}}
{{- define "taut.store.oneNode" -}}
{{- if and (eq (include "taut.store.kind" .) "claim") (eq .Values.modelStore.accessMode "ReadWriteOnce") -}}yes{{- end -}}
{{- end }}

{{/* The volume. Context: the root. */}}
{{- define "taut.store.volume" -}}
{{- $store := .Values.modelStore -}}
{{- $kind := include "taut.store.kind" . -}}
name: models
{{- if eq $kind "hostPath" }}
hostPath: {path: {{ $store.hostPath | quote }}, type: DirectoryOrCreate}
{{- else if eq $kind "emptyDir" }}
emptyDir: {{- toYaml $store.emptyDir | nindent 2 }}
{{- else if eq $kind "ephemeral" }}
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: [ReadWriteOnce]
      storageClassName: {{ $store.ephemeral.storageClass | quote }}
      resources: {requests: {storage: {{ default $store.size $store.ephemeral.size }}}}
{{- else }}
persistentVolumeClaim:
  claimName: {{ include "taut.store.claim" . | quote }}
  {{- if eq $store.accessMode "ReadOnlyMany" }}
  readOnly: true
  {{- end }}
{{- end }}
{{- end }}

{{/*
Who makes the claim: `hook` before the prepare Job, `ordinary` as an object of the release, or nobody since it is there. A claim
that an earlier chart made as an object of the release stays one, or Helm would delete it. Context: the root.
*/}}
{{- define "taut.store.made" -}}
{{- $store := .Values.modelStore -}}
{{- if and (not $store.existingClaim) (eq (include "taut.store.kind" .) "claim") (include "taut.store.used" .) -}}
{{- $there := lookup "v1" "PersistentVolumeClaim" (include "taut.namespace" .) (include "taut.store.claim" .) -}}
{{- if $there -}}
{{- if eq (dig "metadata" "annotations" "meta.helm.sh/release-name" "" $there) .Release.Name -}}ordinary{{- end -}}
{{- else -}}
{{- ternary "hook" "ordinary" (eq (include "taut.prepare.run" .) "hook") -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
A ReadWriteOnce volume is attached to one node, so the pods that mount it keep together; the user's own affinity wins.
Context: {root, own}.
*/}}
{{- define "taut.affinity" -}}
{{- $together := dict -}}
{{- if include "taut.store.oneNode" .root -}}
{{- $labels := merge (dict "taut/store" "mounted") (include "taut.selector" .root | fromYaml) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) -}}
{{- $together = dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- include "taut.merge" (list $together .own) -}}
{{- end }}

{{/* Whether a worker's pod mounts a claim that others mount too. Context: {root, variant}. */}}
{{- define "taut.worker.onStore" -}}
{{- if or (include "taut.cache.claim" .root) (and (not .variant.artifact) (eq (include "taut.store.kind" .root) "claim")) -}}yes{{- end -}}
{{- end }}

{{/*
What the user gave to a Job on the store, with where it may run. The first pod of a volume decides on its zone, and of local
storage on its node, and a ReadWriteOnce volume is where its workers are: so a Job takes what they say of their nodes, and its
own keys over that. Context: {root, own}; own is the Job's section.
*/}}
{{- define "taut.store.job" -}}
{{- $root := .root -}}
{{- $own := .own -}}
{{- $layers := list -}}
{{- $selector := dict -}}
{{- if or (include "taut.store.oneNode" $root) $own.gpus -}}
{{- range $variant := $root.Values.variants -}}
{{- if not (or .artifact .urls) -}}
{{- $worker := include "taut.worker.of" (dict "root" $root "variant" .) | fromYaml -}}
{{- range $key, $value := default dict $worker.nodeSelector -}}
{{- if and (hasKey $selector $key) (ne (get $selector $key) $value) (include "taut.store.oneNode" $root) -}}
{{- fail (printf "variants[%s].nodeSelector: %s is %q here and %q in another variant, and with modelStore.accessMode ReadWriteOnce all workers are on one node; use ReadWriteMany" $variant.name $key $value (get $selector $key)) -}}
{{- end -}}
{{- $_ := set $selector $key $value -}}
{{- end -}}
{{- $taken := pick $worker "affinity" -}}
{{- $taints := concat (default list $worker.tolerations) (include "taut.gpu.tolerations" $worker | fromYamlArray) -}}
{{- $_ := set $taken "tolerations" $taints -}}
{{- if $own.gpus -}}{{- $taken = merge $taken (pick $worker "runtimeClassName") -}}{{- end -}}
{{- $layers = append $layers $taken -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $of := include "taut.overlay" (append $layers (dict "nodeSelector" $selector)) | fromYaml -}}
{{- $of = include "taut.overlay" (list $of $own) | fromYaml -}}
{{- $_ := set $of "tolerations" (default list $of.tolerations | uniq) -}}
{{- $_ := set $of "affinity" (include "taut.affinity" (dict "root" $root "own" $of.affinity) | fromYaml) -}}
{{- toYaml $of -}}
{{- end }}
