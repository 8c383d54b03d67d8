{{/*
How many pods, where somebody else may have said so since: an autoscaler, kubectl scale. Context: {root, api, kind, name, own, wanted, auto};
`own` is the key of the object's spec that only whoever installs it sets; with `auto` an autoscaler decides.

A value that is applied (server-side) and differs from what another manager set is a conflict, which fails an upgrade; a value
that this release alone set and no longer gives goes back to 1. So the field is left out only where another manager holds it and
this release does not. Client-side, Helm takes away what it once gave, whoever changed it: there the live number is given.
*/}}
{{- define "taut.replicas" -}}
{{- $live := lookup .api .kind (include "taut.namespace" .root) .name -}}
{{- $asked := ternary "auto" (toString (int .wanted)) .auto -}}
{{- $given := ternary "" (toString (int .wanted)) .auto -}}
{{- if $live -}}
{{- $now := toString (int (dig "spec" "replicas" 1 $live)) -}}
{{- $before := dig "metadata" "annotations" "taut/replicas" "" $live -}}
{{- $managed := include "taut.replicas.managers" (dict "live" $live "own" .own) | fromYaml -}}
{{- if .auto -}}
{{- $given = ternary "" $now (and $managed.applies (not $managed.ours) (not (empty $managed.others))) -}}
{{- else if and $managed.others (ne $now $given) -}}
{{- if or (eq $before $asked) (eq $before "") -}}
{{- $given = $now -}}
{{- else if $managed.applies -}}
{{- $scaler := ternary "delete its autoscaler, then " "" (has "kube-controller-manager" $managed.others) -}}
{{- fail (printf "%s: %s wanted, but %s set %s of %s to %s: %skubectl -n %s scale %s/%s --replicas=%s" .key $given (join ", " $managed.others) .kind .name $now $scaler (include "taut.namespace" .root) (lower .kind) .name $given) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "asked" $asked "given" $given) -}}
{{- end }}

{{/* Who set spec.replicas of an object. `ours`: this release; `applies`: it installs by server-side apply. Context: {live, own}. */}}
{{- define "taut.replicas.managers" -}}
{{- $own := printf "f:%s" .own -}}
{{- $result := dict "ours" false "applies" false "others" list -}}
{{- range dig "metadata" "managedFields" list .live -}}
{{- $spec := dig "fieldsV1" "f:spec" dict . -}}
{{- $installs := and (hasKey $spec $own) (not (get . "subresource")) -}}
{{- if and $installs (eq .operation "Apply") -}}{{- $_ := set $result "applies" true -}}{{- end -}}
{{- if hasKey $spec "f:replicas" -}}
{{- if $installs -}}{{- $_ := set $result "ours" true -}}
{{- else -}}{{- $_ := set $result "others" (append $result.others .manager | uniq) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $result -}}
{{- end }}
