{{/* Guard and rollouts: what they need of each other, of the variants and of the gateways. Context: {root, names}. */}}
{{- define "taut.checks.rollout" -}}
{{- $names := .names -}}
{{- $values := .root.Values -}}
{{- $guard := $values.guard -}}
{{- $rollout := $values.rollout -}}
{{- range $section, $own := dict "guard" (list "enabled" "baseline") "rollout" (list "enabled" "store" "events" "journal") -}}
{{- $given := get $values $section -}}
{{- if not $given.enabled -}}
{{- range $key, $_ := $given -}}
{{- if not (has $key $own) -}}{{- fail (printf "%s.%s: of no use while %s.enabled is false" $section $key $section) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $guard.enabled (not (has $guard.baseline $names)) -}}
{{- fail (printf "guard.baseline: %q is not the name of a variant (%s)" $guard.baseline (join ", " $names)) -}}
{{- end -}}
{{- if and $guard.enabled (eq (len $names) 1) -}}
{{- fail (printf "guard.baseline: %s is the only variant, and there is nothing to compare with it" $guard.baseline) -}}
{{- end -}}
{{- if $rollout.enabled -}}
{{- if not $guard.enabled -}}
{{- fail "rollout.enabled: rollouts rest on the guard's evidence; set guard.enabled and guard.baseline" -}}
{{- end -}}
{{- if eq $rollout.store "file" -}}
{{- $why := "" -}}
{{- if gt (int $values.gateway.replicas) 1 -}}{{- $why = printf "gateway.replicas is %d" (int $values.gateway.replicas) -}}{{- end -}}
{{- if ne $values.gateway.autoscaling.kind "none" -}}{{- $why = "gateway.autoscaling makes several" -}}{{- end -}}
{{- if $why -}}
{{- fail (printf "rollout.store: file is the memory of a single gateway, and %s; set rollout.store: redis and rollout.redis.url, or one gateway" $why) -}}
{{- end -}}
{{- if $rollout.redis -}}
{{- fail "rollout.redis: of no use with rollout.store: file; set rollout.store: redis" -}}
{{- end -}}
{{- else if not (dig "url" "" (default dict $rollout.redis)) -}}
{{- fail "rollout.redis.url: needed with rollout.store: redis" -}}
{{- end -}}
{{- end -}}
{{- end }}
