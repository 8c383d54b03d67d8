{{/* The gateway's YAML file: sections passed on from the values, and what only the chart can know. */}}
{{- define "taut.gateway.config" -}}
{{- include "taut.checks" . -}}
{{- $config := deepCopy .Values.gateway.config -}}
{{- $listen := dict "host" .Values.gateway.listenHost "port" 8000 -}}
{{- if .Values.gateway.tls.existingSecret -}}
{{- $_ := set $listen "tls" (dict "certificate" "/etc/taut/tls/tls.crt" "key" "/etc/taut/tls/tls.key") -}}
{{- end -}}
{{- $_ := set $config "listen" $listen -}}
{{- $_ := set $config "admin" (dict "host" "127.0.0.1" "port" 8001) -}}
{{- $_ := set $config "drain_timeout_s" (int .Values.gateway.drain.timeoutSeconds) -}}
{{- if .Values.gateway.apiKeys.existingSecret -}}
{{- $_ := set $config "api_keys_file" (printf "/etc/taut/keys/%s" .Values.gateway.apiKeys.key) -}}
{{- end -}}
{{- if .Values.gateway.redisPassword.existingSecret -}}
{{- $file := printf "/etc/taut/redis/%s" .Values.gateway.redisPassword.key -}}
{{- with dig "rate_limits" "redis" dict $config -}}{{- $_ := set . "password_file" $file -}}{{- end -}}
{{- end -}}
{{- if .Values.guard.enabled -}}
{{- $_ := set $config "guard" (omit .Values.guard "enabled" "baseline") -}}
{{- end -}}
{{- if .Values.rollout.enabled -}}
{{- $_ := set $config "rollout" (include "taut.gateway.rollout" . | fromYaml) -}}
{{- end -}}
{{- $variants := list -}}
{{- range .Values.variants -}}
{{- $service := include "taut.worker.name" (dict "root" $ "variant" .) -}}
{{- $discover := dict "dns" (dict "host" (printf "%s.%s.svc.%s." $service (include "taut.namespace" $) $.Values.clusterDomain) "port" 8000) -}}
{{- if eq $.Values.gateway.discovery "kubernetes" -}}
{{- $discover = dict "kubernetes" (dict "namespace" (include "taut.namespace" $) "service" $service "port" "http") -}}
{{- end -}}
{{- $variant := deepCopy (default dict .gateway) -}}
{{- $_ := set $variant "name" .name -}}
{{- if .urls -}}
{{- $workers := list -}}
{{- $key := include "taut.gateway.workerKey" . -}}
{{- range .urls -}}
{{- $worker := dict "name" (trimPrefix "http://" .) "url" . -}}
{{- if $key -}}{{- $_ := set $worker "api_key_file" $key -}}{{- end -}}
{{- $workers = append $workers $worker -}}
{{- end -}}
{{- $_ := set $variant "workers" $workers -}}
{{- with .servedName -}}{{- $_ := set $variant "served_name" . -}}{{- end -}}
{{- else -}}
{{- $_ := set $variant "discover" $discover -}}
{{- end -}}
{{- if hasKey . "weight" -}}{{- $_ := set $variant "weight" .weight -}}{{- end -}}
{{- $variants = append $variants $variant -}}
{{- end -}}
{{- $model := deepCopy .Values.model.gateway -}}
{{- $_ := set $model "name" .Values.model.name -}}
{{- $_ := set $model "aliases" .Values.model.aliases -}}
{{- $_ := set $model "max_model_len" (int .Values.model.maxModelLen) -}}
{{- if .Values.guard.enabled -}}{{- $_ := set $model "baseline" .Values.guard.baseline -}}{{- end -}}
{{- $_ := set $model "variants" $variants -}}
{{- $_ := set $config "models" (list $model) -}}
{{- toYaml $config -}}
{{- end }}

{{/* The section rollout of the gateway's file: what the values pass on, its journal, and whom its Events are about. */}}
{{- define "taut.gateway.rollout" -}}
{{- $rollout := omit (deepCopy .Values.rollout) "enabled" "events" "journal" -}}
{{- if eq $rollout.store "file" -}}
{{- $_ := set $rollout "directory" "/var/lib/taut/rollout" -}}
{{- else if .Values.gateway.redisPassword.existingSecret -}}
{{- $_ := set $rollout.redis "password_file" (printf "/etc/taut/redis/%s" .Values.gateway.redisPassword.key) -}}
{{- end -}}
{{- if .Values.rollout.events -}}
{{- $_ := set $rollout "events" (dict "namespace" (include "taut.namespace" .) "deployment" (include "taut.gateway.name" .)) -}}
{{- end -}}
{{- toYaml $rollout -}}
{{- end }}

{{/* File with the key that workers elsewhere want; empty if they want none. Context: the variant. */}}
{{- define "taut.gateway.workerKey" -}}
{{- with .apiKey -}}/etc/taut/workers/{{ $.name }}/{{ default "key" .key }}{{- end -}}
{{- end }}

{{/* Whether gateways talk to the Kubernetes API: to find workers, or to write Events. */}}
{{- define "taut.gateway.api" -}}
{{- if or (eq .Values.gateway.discovery "kubernetes") (and .Values.rollout.enabled .Values.rollout.events) -}}true{{- end -}}
{{- end }}

{{/* Whether the journal of rollouts is a volume, which one gateway at a time may use. */}}
{{- define "taut.rollout.volume" -}}
{{- if and .Values.rollout.enabled (eq .Values.rollout.store "file") -}}true{{- end -}}
{{- end }}

{{- define "taut.rollout.claim" -}}
{{- default (printf "%s-rollout" (include "taut.fullname" .)) .Values.rollout.journal.existingClaim -}}
{{- end }}

{{/* A hash of what a gateway reads once, at its start; the rest it takes over while it runs. */}}
{{- define "taut.gateway.fixed" -}}
{{- pick (include "taut.gateway.config" . | fromYaml) "listen" "admin" "rate_limits" "tracing" "access_log" "drain_timeout_s" "guard" "rollout" | toYaml | sha256sum -}}
{{- end }}
