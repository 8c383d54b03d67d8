{{/* Mistakes that a schema of single values cannot see; each message names the keys. */}}
{{- define "taut.checks" -}}
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
{{- if and $variant.multiNode (eq $.Values.modelStore.accessMode "ReadWriteOnce") -}}
{{- fail (printf "modelStore.accessMode: variants[%s].multiNode needs ReadWriteMany" $variant.name) -}}
{{- end -}}
{{- with $variant.autoscaling -}}
{{- if $variant.multiNode -}}
{{- fail (printf "variants[%s].autoscaling: not offered together with multiNode" $variant.name) -}}
{{- end -}}
{{- if eq .kind "keda" -}}{{- $keda = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if le $weights 0.0 -}}
{{- fail "variants: the weights are all 0, so that no request would be served" -}}
{{- end -}}
{{- if and $keda (not .Values.keda.prometheusAddress) -}}
{{- fail "keda.prometheusAddress: needed with autoscaling.kind keda" -}}
{{- end -}}
{{- if and .Values.gateway.apiKeys.existingSecret (not .Values.gateway.adminKey.existingSecret) -}}
{{- fail "gateway.adminKey.existingSecret: needed with gateway.apiKeys, or the stop hook could not drain; the Secret holds a key with the scope admin" -}}
{{- end -}}
{{- if and .Values.gateway.redisPassword.existingSecret (not (dig "rate_limits" "redis" "" .Values.gateway.config)) -}}
{{- fail "gateway.redisPassword: given without gateway.config.rate_limits.redis" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.gatewayEgress) -}}
{{- range $what, $section := dict "rate_limits.redis" (dig "rate_limits" "redis" "" .Values.gateway.config) "tracing" (get .Values.gateway.config "tracing") -}}
{{- if $section -}}
{{- fail (printf "networkPolicy.gatewayEgress: gateway.config.%s needs a rule that lets the gateway reach it" $what) -}}
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
{{- if eq (empty .Values.validation.text.configMap) (empty .Values.validation.text.path) -}}
{{- fail "validation.text: give either configMap or path: the text to judge on" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.host: needed with ingress.enabled" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: needed with httpRoute.enabled" -}}
{{- end -}}
{{- end }}
