{{/* Keys that another key leaves without effect: refused, since whoever gave them meant something. Context: the root. */}}
{{- define "taut.checks.unused" -}}
{{- range .Values.variants -}}{{- include "taut.checks.unusedOfVariant" . -}}{{- end -}}
{{- $store := .Values.modelStore -}}
{{- $taken := or $store.existingClaim (ne (include "taut.store.kind" .) "claim") -}}
{{- include "taut.unused" (list $taken "modelStore.storageClass" $store.storageClass "no claim is made for the store") -}}
{{- $cache := .Values.worker.cache -}}
{{- include "taut.unused" (list (not $cache.size) "worker.cache.storageClass" $cache.storageClass "it goes with worker.cache.size") -}}
{{- with .Values.rollout -}}
{{- include "taut.unused" (list .journal.existingClaim "rollout.journal.storageClass" .journal.storageClass "rollout.journal.existingClaim has its own") -}}
{{- include "taut.unused" (list (and .enabled (eq .store "redis")) "rollout.journal.existingClaim" .journal.existingClaim "with rollout.store: redis nothing is written to a claim") -}}
{{- end -}}
{{- $prepare := .Values.prepare -}}
{{- range $key := list "env" "existingSecret" -}}
{{- include "taut.unused" (list (not $prepare.copy.directories) (printf "prepare.copy.%s" $key) (get $prepare.copy $key) "it goes with prepare.copy.directories") -}}
{{- end -}}
{{- include "taut.unused" (list (ne $prepare.device "cuda") "prepare.gpus" $prepare.gpus "prepare.device is cpu") -}}
{{- if $prepare.enabled -}}
{{- $recipes := false -}}{{- range .Values.variants -}}{{- if .recipe -}}{{- $recipes = true -}}{{- end -}}{{- end -}}
{{- include "taut.unused" (list (not $recipes) "prepare.compressArgs" $prepare.compressArgs "no variant has a recipe") -}}
{{- end -}}
{{- if .Values.validation.enabled -}}{{- include "taut.checks.unusedOfValidation" .Values.validation -}}{{- end -}}
{{- end }}

{{/* Context: list of: whether it is of no use, key, value, why. */}}
{{- define "taut.unused" -}}
{{- if and (index . 0) (index . 2) -}}{{- fail (printf "%s: of no use: %s" (index . 1) (index . 3)) -}}{{- end -}}
{{- end }}

{{/* Context: the section. */}}
{{- define "taut.checks.unusedOfValidation" -}}
{{- $files := ne .through "servers" -}}
{{- include "taut.unused" (list (not $files) "validation.device" (eq .device "cuda") "through servers, workers compute") -}}
{{- include "taut.unused" (list (or (not $files) (ne .device "cuda")) "validation.gpus" .gpus (ternary "validation.device is cpu" "through servers, workers compute" $files)) -}}
{{- include "taut.unused" (list $files "validation.acceptLowerBound" .acceptLowerBound "only servers alone tell a lower bound") -}}
{{- end }}

{{/* Context: the variant. */}}
{{- define "taut.checks.unusedOfVariant" -}}
{{- $here := printf "variants[%s]" .name -}}
{{- $urls := .urls -}}
{{- range $key, $value := . -}}
{{- $elsewhere := has $key (list "urls" "servedName" "apiKey") -}}
{{- include "taut.unused" (list (and $elsewhere (not $urls)) (printf "%s.%s" $here $key) $value "it goes with urls of workers that run elsewhere") -}}
{{- $ours := not (or $elsewhere (has $key (list "name" "weight" "gateway" "requireVerdict" "trust"))) -}}
{{- include "taut.unused" (list (and $ours $urls) (printf "%s.%s" $here $key) $value "with urls, the workers run elsewhere") -}}
{{- end -}}
{{- include "taut.unused" (list (not .gpus) (printf "%s.gpuResource" $here) .gpuResource "it goes with gpus") -}}
{{- include "taut.unused" (list .gpus (printf "%s.kvCacheGib" $here) .kvCacheGib "it is of workers on a CPU; of a GPU, vLLM takes --gpu-memory-utilization of vllmArgs") -}}
{{- with .autoscaling -}}
{{- include "taut.unused" (list true (printf "%s.replicas" $here) (hasKey $ "replicas") "autoscaling decides, from minReplicas to maxReplicas") -}}
{{- $keda := eq .kind "keda" -}}
{{- range $key, $value := . -}}
{{- $other := ternary (list "podMetric") (list "tokensPerReplica" "queueWaitSeconds") $keda -}}
{{- include "taut.unused" (list (has $key $other) (printf "%s.autoscaling.%s" $here $key) $value (printf "kind is %s" (ternary "keda" "hpa" $keda))) -}}
{{- end -}}
{{- end -}}
{{- end }}
