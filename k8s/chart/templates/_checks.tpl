{{/* Mistakes that a schema of single values cannot see; each message names the keys. */}}
{{- define "taut.checks" -}}
{{- include "taut.checks.spellings" . -}}
{{- include "taut.checks.store" . -}}
{{- if not .Values.variants -}}
{{- fail "variants: at least one; workers that run elsewhere are a variant with variants[].urls" -}}
{{- end -}}
{{- $names := list -}}
{{- $weights := 0.0 -}}
{{- $keda := eq .Values.gateway.autoscaling.kind "keda" -}}
{{- range $variant := .Values.variants -}}
{{- if has $variant.name $names -}}
{{- fail (printf "variants: two entries are named %q" $variant.name) -}}
{{- end -}}
{{- $names = append $names $variant.name -}}
{{- $weights = addf $weights (default 1.0 $variant.weight) -}}
{{- if and (hasKey $variant "weight") (not $variant.weight) -}}
{{- $weights = subf $weights 1.0 -}}
{{- end -}}
{{- include "taut.checks.variant" (dict "root" $ "variant" $variant) -}}
{{- if and $variant.trust (not $variant.requireVerdict) -}}
{{- fail (printf "variants[%s].trust: goes with requireVerdict: PASS; add it" $variant.name) -}}
{{- end -}}
{{- if and $variant.requireVerdict $variant.recipe -}}
{{- fail (printf "variants[%s].requireVerdict: what prepare compresses by a recipe has no verdict yet; name a checkpoint that taut validate passed" $variant.name) -}}
{{- end -}}
{{- if and $variant.requireVerdict $variant.urls -}}
{{- fail (printf "variants[%s].requireVerdict: those workers run elsewhere; start them with --require-verdict" $variant.name) -}}
{{- end -}}
{{- if and $variant.recipe $variant.artifact -}}
{{- fail (printf "variants[%s].recipe: a checkpoint is compressed in the model store, not in an artifact" $variant.name) -}}
{{- end -}}
{{- if and $variant.recipe $.Values.prepare.enabled (not $.Values.model.source) -}}
{{- fail (printf "model.source: needed to compress by variants[%s].recipe" $variant.name) -}}
{{- end -}}
{{- if and $variant.artifact (semverCompare "<1.31-0" $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "variants[%s].artifact: needs Kubernetes 1.31 with the feature gate ImageVolume, or 1.35; here is %s" $variant.name $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- with $variant.rollout -}}
{{- if not (or .maxSurge .maxUnavailable) -}}
{{- fail (printf "variants[%s].rollout: maxSurge and maxUnavailable cannot both be 0" $variant.name) -}}
{{- end -}}
{{- end -}}
{{- with $variant.autoscaling -}}
{{- if $variant.multiNode -}}
{{- fail (printf "variants[%s].autoscaling: not offered together with multiNode" $variant.name) -}}
{{- end -}}
{{- if lt (int .minReplicas) 1 -}}
{{- fail (printf "variants[%s].autoscaling.minReplicas: at least 1: what it scales by comes from workers that run, so nothing would wake one up; variants[].replicas: 0 switches a variant off" $variant.name) -}}
{{- end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "variants[%s].autoscaling.minReplicas: %d is more than maxReplicas %d" $variant.name (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if eq .kind "keda" -}}{{- $keda = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if le $weights 0.0 -}}
{{- fail "variants: the weights are all 0, so that no request would be served" -}}
{{- end -}}
{{- range $side, $name := pick (default dict .Values.model.gateway.brown_out) "from" "to" -}}
{{- if not (has $name $names) -}}
{{- fail (printf "model.gateway.brown_out.%s: %q is not the name of a variant (%s)" $side $name (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.gateway.autoscaling -}}
{{- $requests := or .inflightPerReplica .queuedPerReplica -}}
{{- if and (eq .kind "keda") (not $requests) -}}
{{- fail "gateway.autoscaling: kind keda needs inflightPerReplica or queuedPerReplica" -}}
{{- end -}}
{{- if and (eq .kind "hpa") (not (or $requests .cpuPercent)) -}}
{{- fail "gateway.autoscaling: kind hpa needs cpuPercent, inflightPerReplica or queuedPerReplica" -}}
{{- end -}}
{{- if and .behavior (eq .kind "none") -}}
{{- fail "gateway.autoscaling.behavior: unused with kind none" -}}
{{- end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "gateway.autoscaling.minReplicas: %d is more than maxReplicas %d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.worker.cache -}}
{{- if and .existingClaim .size -}}
{{- fail "worker.cache: give either existingClaim or size" -}}
{{- end -}}
{{- if and .warm.enabled (not (or .existingClaim .size)) -}}
{{- fail "worker.cache.warm: needs a claim to fill: worker.cache.existingClaim or worker.cache.size" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.prepare.copy.directories (not .Values.prepare.enabled) -}}
{{- fail "prepare.copy.directories: the prepare Job copies them, and prepare.enabled is false" -}}
{{- end -}}
{{- include "taut.checks.unused" . -}}
{{- if and $keda (not .Values.keda.prometheusAddress) -}}
{{- fail "keda.prometheusAddress: needed with autoscaling.kind keda" -}}
{{- end -}}
{{- if and .Values.gateway.apiKeys.existingSecret (not .Values.gateway.adminKey.existingSecret) -}}
{{- fail "gateway.adminKey.existingSecret: needed with gateway.apiKeys, or the stop hook could not drain; the Secret holds a key with the scope admin" -}}
{{- end -}}
{{- include "taut.checks.rollout" (dict "root" . "names" $names) -}}
{{- if and .Values.gateway.redisPassword.existingSecret (not (or (dig "rate_limits" "redis" "" .Values.gateway.config) .Values.rollout.redis)) -}}
{{- fail "gateway.redisPassword: given without gateway.config.rate_limits.redis or rollout.redis" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.gatewayEgress) -}}
{{- range $what, $section := dict "gateway.config.rate_limits.redis" (dig "rate_limits" "redis" "" .Values.gateway.config) "gateway.config.tracing" (get .Values.gateway.config "tracing") "rollout.redis" .Values.rollout.redis "rollout.webhook" .Values.rollout.webhook -}}
{{- if $section -}}
{{- fail (printf "networkPolicy.gatewayEgress: %s needs a rule that lets the gateway reach it" $what) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.validation.enabled -}}
{{- range $side := list "baseline" "candidate" -}}
{{- $wanted := get $.Values.validation $side -}}
{{- if not (has $wanted $names) -}}
{{- fail (printf "validation.%s: %q is not the name of a variant (%s)" $side $wanted (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.validation.baseline .Values.validation.candidate -}}
{{- fail "validation.candidate: the same variant as validation.baseline" -}}
{{- end -}}
{{- $validation := .Values.validation -}}
{{- if and (eq $validation.through "servers") (not $validation.acceptLowerBound) (not (hasPrefix "/" $validation.policy)) -}}
{{- fail "validation.through: servers tell a lower bound of mean_kl only, which every built-in policy limits, so that it would never pass; use both, or set validation.acceptLowerBound" -}}
{{- end -}}
{{- range .Values.variants -}}
{{- if and .apiKey (has .name (list $validation.baseline $validation.candidate)) -}}
{{- fail (printf "validation.enabled: the Job does not have the key that variants[%s].apiKey names; judge these servers by taut validate --api-key-file" .name) -}}
{{- end -}}
{{- end -}}
{{- if ne $validation.through "servers" -}}
{{- range .Values.variants -}}
{{- if and (or .artifact .urls) (has .name (list $validation.baseline $validation.candidate)) -}}
{{- fail (printf "validation.through: %s loads checkpoints from the model store, and variants[%s] is %s; use servers" $validation.through .name (ternary "an artifact" "elsewhere" (empty .urls))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq (empty .Values.validation.text.configMap) (empty .Values.validation.text.path) -}}
{{- fail "validation.text: give either configMap or path: the text to judge on" -}}
{{- end -}}
{{- end -}}
{{- with .Values.ingress -}}
{{- if and .enabled (not (or .host .hosts)) -}}
{{- fail "ingress.host: needed with ingress.enabled (or ingress.hosts)" -}}
{{- end -}}
{{- if and .enabled $.Values.gateway.tls.existingSecret (not (regexMatch "(?i)https|backend-config" (toJson (list .annotations $.Values.gateway.service.annotations)))) -}}
{{- fail "ingress.annotations: the gateway speaks HTTPS (gateway.tls), and the controller must be told, e.g. nginx.ingress.kubernetes.io/backend-protocol: HTTPS (Traefik: gateway.service.annotations)" -}}
{{- end -}}
{{- end -}}
{{- with .Values.monitoring.serviceMonitor -}}
{{- if and .scrapeTimeout (gt (int (include "taut.seconds" .scrapeTimeout)) (int (include "taut.seconds" .interval))) -}}
{{- fail (printf "monitoring.serviceMonitor.scrapeTimeout: %s is more than interval %s, which Prometheus refuses" .scrapeTimeout .interval) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.endpointPicker.name: needed with inferencePool.enabled: the Service of the endpoint picker that routes for the pool" -}}
{{- end -}}
{{- if and .Values.model.revision (not (regexMatch "^[A-Za-z0-9][^/]*/[^/]+$" .Values.model.source)) -}}
{{- fail "model.revision: pins a repository of the hub, and model.source is none (OWNER/NAME)" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: needed with httpRoute.enabled" -}}
{{- end -}}
{{- end }}

{{/* Seconds of a time like 15s or 2m. */}}
{{- define "taut.seconds" -}}
{{- $number := int (regexFind "^[0-9]+" .) -}}
{{- ternary (mul 60 $number) $number (hasSuffix "m" .) -}}
{{- end }}
