{{/*
Every pod template of the chart. Context: {root, of, labels, annotations, spec, gpus, gpuResource, resources}: `of` holds the keys of a
pod that the user gave (values.schema.yaml: pod), `spec` is what this pod is for, in YAML. Meets the restricted Pod Security
Standard unless told otherwise.
*/}}
{{- define "taut.pod" -}}
{{- $root := .root -}}
{{- $of := .of -}}
{{- $spec := fromYaml .spec -}}
{{- if hasKey $spec "Error" -}}{{- fail (printf "the pod's template is no YAML, a mistake of the chart: %s" $spec.Error) -}}{{- end -}}
{{- $labels := merge (deepCopy .labels) (default dict $of.podLabels) $root.Values.podLabels $root.Values.commonLabels -}}
{{- $annotations := merge (deepCopy (default dict .annotations)) (default dict $of.podAnnotations) $root.Values.podAnnotations $root.Values.commonAnnotations -}}
{{- /* A Service named taut-gateway would otherwise set TAUT_GATEWAY_PORT=tcp://… in every pod. */ -}}
{{- $_ := set $spec "enableServiceLinks" false -}}
{{- if not (hasKey $spec "automountServiceAccountToken") -}}{{- $_ := set $spec "automountServiceAccountToken" false -}}{{- end -}}
{{- $_ := set $spec "securityContext" (include "taut.merge" (list $root.Values.podSecurityContext $of.podSecurityContext) | fromYaml) -}}
{{- with $root.Values.image.pullSecrets -}}
{{- $secrets := list -}}
{{- range . -}}{{- $secrets = append $secrets (dict "name" .) -}}{{- end -}}
{{- $_ := set $spec "imagePullSecrets" $secrets -}}
{{- end -}}
{{- range $key := list "nodeSelector" "priorityClassName" "schedulerName" "runtimeClassName" "hostNetwork" "dnsPolicy" "dnsConfig" "hostAliases" "resourceClaims" "topologySpreadConstraints" "affinity" -}}
{{- with get $of $key -}}{{- $_ := set $spec $key . -}}{{- end -}}
{{- end -}}
{{- if and $of.hostNetwork (not $of.dnsPolicy) -}}{{- $_ := set $spec "dnsPolicy" "ClusterFirstWithHostNet" -}}{{- end -}}
{{- with concat (default list $of.tolerations) (include "taut.gpu.tolerations" . | fromYamlArray) | uniq -}}{{- $_ := set $spec "tolerations" . -}}{{- end -}}
{{- range $key := list "initContainers" "containers" -}}
{{- $own := list -}}
{{- range default list (get $spec $key) -}}
{{- $own = append $own (include "taut.container" (dict "root" $root "of" $of "container" .) | fromYaml) -}}
{{- end -}}
{{- $_ := set $spec $key $own -}}
{{- end -}}
{{- $_ := set $spec "initContainers" (concat (default list $of.initContainers) $spec.initContainers) -}}
{{- $_ := set $spec "containers" (concat $spec.containers (default list $of.sidecars)) -}}
{{- $volumes := concat (default list $spec.volumes) (default list $of.extraVolumes) -}}
{{- with $root.Values.caBundle.configMap -}}
{{- $volumes = append $volumes (dict "name" "ca-bundle" "configMap" (dict "name" .)) -}}
{{- end -}}
{{- $_ := set $spec "volumes" $volumes -}}
{{- range $key := list "initContainers" "volumes" -}}{{- if not (get $spec $key) -}}{{- $_ := unset $spec $key -}}{{- end -}}{{- end -}}
{{- $metadata := dict "labels" $labels -}}
{{- if $annotations -}}{{- $_ := set $metadata "annotations" $annotations -}}{{- end -}}
{{- toYaml (dict "metadata" $metadata "spec" $spec) -}}
{{- end }}

{{/* One of our containers with what the user gave to all of them in its pod. Context: {root, of, container}. */}}
{{- define "taut.container" -}}
{{- $root := .root -}}
{{- $of := .of -}}
{{- $container := .container -}}
{{- $_ := set $container "imagePullPolicy" $root.Values.image.pullPolicy -}}
{{- $context := include "taut.merge" (list $root.Values.containerSecurityContext $container.securityContext) | fromYaml -}}
{{- $_ := set $container "securityContext" (include "taut.merge" (list $context $of.containerSecurityContext) | fromYaml) -}}
{{- $env := concat (default list $container.env) (include "taut.surroundings" $root | fromYamlArray) (include "taut.env" (default list $of.env) | fromYamlArray) -}}
{{- with $env -}}{{- $_ := set $container "env" (include "taut.env.unique" . | fromYamlArray) -}}{{- end -}}
{{- with concat (default list $container.envFrom) (default list $of.envFrom) -}}{{- $_ := set $container "envFrom" . -}}{{- end -}}
{{- $mounts := concat (default list $container.volumeMounts) (default list $of.extraVolumeMounts) -}}
{{- if $root.Values.caBundle.configMap -}}
{{- $mounts = append $mounts (dict "name" "ca-bundle" "mountPath" "/etc/taut/ca" "readOnly" true) -}}
{{- end -}}
{{- with $mounts -}}{{- $_ := set $container "volumeMounts" . -}}{{- end -}}
{{- if not $container.resources -}}{{- $_ := set $container "resources" $root.Values.initResources -}}{{- end -}}
{{- toYaml $container -}}
{{- end }}

{{/* Proxy and certificates, as programs and libraries look for them. Context: the root. */}}
{{- define "taut.surroundings" -}}
{{- $entries := list -}}
{{- range $key, $name := dict "http" "HTTP_PROXY" "https" "HTTPS_PROXY" "no" "NO_PROXY" -}}
{{- with get $.Values.proxy $key -}}
{{- $entries = concat $entries (list (dict "name" $name "value" .) (dict "name" (lower $name) "value" .)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.caBundle -}}
{{- if .configMap -}}
{{- range $name := list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "CURL_CA_BUNDLE" -}}
{{- $entries = append $entries (dict "name" $name "value" (printf "/etc/taut/ca/%s" $.Values.caBundle.key)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $entries -}}
{{- end }}

{{/* Requests and limits with GPUs added to the limits, and claims of the pod. Context: {resources, gpus, gpuResource, claims}. */}}
{{- define "taut.resources" -}}
{{- $resources := deepCopy (default dict .resources) -}}
{{- if .gpus -}}
{{- $limits := merge (dict .gpuResource (int .gpus)) (default dict (get $resources "limits")) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- if .claims -}}
{{- $claims := list -}}
{{- range .claims -}}{{- $claims = append $claims (dict "name" .name) -}}{{- end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* GPUs of a worker, given as `gpus` or among the limits: name → number. Context: what taut.worker.of returns. */}}
{{- define "taut.gpus" -}}
{{- $gpus := dict -}}
{{- range $key, $count := dig "limits" dict (default dict .resources) -}}
{{- if regexMatch "^(nvidia\\.com|amd\\.com|gpu\\.intel\\.com|habana\\.ai)/" $key -}}{{- $_ := set $gpus $key (int $count) -}}{{- end -}}
{{- end -}}
{{- if .gpus -}}{{- $_ := set $gpus .gpuResource (int .gpus) -}}{{- end -}}
{{- toYaml $gpus -}}
{{- end }}

{{/* Taints of GPU nodes; a MIG slice is on a node with the whole card's taint. Context: {gpus, gpuResource, resources}. */}}
{{- define "taut.gpu.tolerations" -}}
{{- $tolerations := list -}}
{{- $keys := include "taut.gpus" . | fromYaml | keys | sortAlpha -}}
{{- range $key := $keys -}}
{{- if hasPrefix "nvidia.com/mig-" $key -}}{{- $keys = append $keys "nvidia.com/gpu" -}}{{- end -}}
{{- end -}}
{{- range $keys | uniq -}}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- toYaml $tolerations -}}
{{- end }}
