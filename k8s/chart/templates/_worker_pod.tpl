{{/* What the user gave to a variant's pods: the variant's keys over `worker`. Context: {root, variant}. */}}
{{- define "taut.worker.of" -}}
{{- include "taut.overlay" (list .root.Values.worker .variant) -}}
{{- end }}

{{/* The pod of one worker. Context: {root, variant, rank}; rank: single, leader or follower. */}}
{{- define "taut.worker.labels" -}}
{{ include "taut.component.selector" (dict "root" .root "component" "worker") }}
taut/variant: {{ .variant.name | quote }}
taut/serves: {{ ne .rank "follower" | quote }}
{{- if include "taut.worker.onStore" . }}
taut/store: mounted
{{- end }}
{{- if include "taut.worker.prepares" . }}
taut/prepares: "true"
{{- end }}
{{- end }}

{{/* Whether the pod fetches and compresses for itself. Context: as above. */}}
{{- define "taut.worker.prepares" -}}
{{- if and (eq (include "taut.prepare.run" .root) "pod") (not .variant.artifact) -}}yes{{- end -}}
{{- end }}

{{/* taut worker's own arguments, then vLLM's; of several nodes only the first has an API. */}}
{{- define "taut.worker.args" -}}
{{- $args := list "worker" (include "taut.checkpoint" .variant) "--name" .root.Values.model.name "--host" "$(POD_IP)" "--port" "8000" -}}
{{- $args = concat $args (list "--shutdown-timeout" (toString (int .root.Values.worker.drainSeconds))) -}}
{{- if eq .root.Values.worker.verify "full" -}}{{- $args = concat $args (list "--verify" "full") -}}{{- end -}}
{{- with .variant.requireVerdict -}}{{- $args = concat $args (list "--require-verdict" .) -}}{{- end -}}
{{- with .variant.trust -}}{{- $args = concat $args (list "--trust" (printf "/etc/taut/trust/%s" (default "verdict.pub" .key))) -}}{{- end -}}
{{- $args = concat $args (include "taut.worker.engine" . | fromYamlArray) -}}
{{- toYaml $args -}}
{{- end }}

{{/* What the worker and the Job that warms its compile cache must be told alike. Context: as above. */}}
{{- define "taut.worker.engine" -}}
{{- $variant := .variant -}}
{{- $args := list "--max-model-len" (toString (int .root.Values.model.maxModelLen)) -}}
{{- with $variant.kvCacheDtype -}}{{- $args = concat $args (list "--kv-cache-dtype" .) -}}{{- end -}}
{{- with $variant.kvCacheGib -}}{{- $args = concat $args (list "--kv-cache-gib" (toString (int .))) -}}{{- end -}}
{{- with $variant.kernels -}}{{- $args = concat $args (list "--kernels" .) -}}{{- end -}}
{{- range $key, $flag := dict "decodeAttention" "decode-attention" "fusedOps" "fused-ops" -}}
{{- $told := get $variant $key -}}
{{- if kindIs "bool" $told -}}{{- $args = append $args (printf "--%s%s" (ternary "" "no-" $told) $flag) -}}{{- end -}}
{{- end -}}
{{- $vllm := default list $variant.vllmArgs -}}
{{- if ne .rank "single" -}}{{- $vllm = concat $vllm (include "taut.group.args" . | fromYamlArray) -}}{{- end -}}
{{- if $vllm -}}{{- $args = concat $args (list "--") $vllm -}}{{- end -}}
{{- toYaml $args -}}
{{- end }}

{{/* Context: {root, variant}. */}}
{{- define "taut.worker.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: TAUT_HOME, value: /models}
- {name: HOME, value: /cache}
- {name: VLLM_CACHE_ROOT, value: /cache/vllm}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
{{- if .variant.multiNode }}
# Where the other ranks find this one.
- {name: VLLM_HOST_IP, value: $(POD_IP)}
{{- end }}
{{- if include "taut.cache.claim" .root }}
- {name: TAUT_COMPILE_CACHE, value: /compile-cache}
{{- end }}
{{- end }}

{{/* Context: {root, variant, writes}; writes: whether it may write to the compile cache. */}}
{{- define "taut.worker.mounts" -}}
{{- if .variant.artifact }}
- {name: artifact, mountPath: /artifact, readOnly: true}
{{- else }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
- {name: cache, mountPath: /cache}
{{- if include "taut.cache.claim" .root }}
- {name: compile-cache, mountPath: /compile-cache, readOnly: {{ not .writes }}}
{{- end }}
{{- if .variant.trust }}
- {name: trust, mountPath: /etc/taut/trust, readOnly: true}
{{- end }}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{/* Context: {root, variant}. */}}
{{- define "taut.worker.volumes" -}}
{{- $cache := .root.Values.worker.cache -}}
{{- with .variant.artifact }}
- name: artifact
  image: {reference: {{ .reference | quote }}, pullPolicy: {{ default "IfNotPresent" .pullPolicy }}}
{{- else }}
- {{ include "taut.store.volume" .root | nindent 2 | trim }}
{{- end }}
- name: cache
  emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- with include "taut.cache.claim" .root }}
- name: compile-cache
  persistentVolumeClaim: {claimName: {{ . | quote }}}
{{- end }}
{{- with .variant.trust }}
- name: trust
  configMap: {name: {{ .configMap | quote }}}
{{- end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ default .root.Values.worker.shmSize .variant.shmSize }}}
# A warm compile cache that is mounted read-only is copied here.
- name: tmp
  emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- if include "taut.worker.prepares" . }}
- {name: scratch, emptyDir: {}}
{{- end }}
{{- end }}

{{/* Context: as the pod's. */}}
{{- define "taut.worker.init" -}}
{{- $warm := .root.Values.worker.cache.warm -}}
{{- if include "taut.worker.prepares" . }}
{{ include "taut.prepare.steps" (dict "root" .root "variants" (list .variant) "env" .root.Values.prepare.env "envFrom" .root.Values.prepare.envFrom) }}
{{- end }}
{{- if and $warm.enabled (eq .rank "single") }}
# Two compilers for the same kernels help nobody; but serving cold is better than not at all.
- name: wait-for-cache
  image: {{ include "taut.image" (dict "root" .root "image" .root.Values.image.worker) }}
  command:
    - sh
    - -c
    - 's=0; until test -f "$0"; do test "$s" -lt "$1" || { echo "no warm cache after $1 s: starting cold"; break; }; sleep 2; s=$((s + 2)); done'
  args: [/compile-cache/warmed/{{ include "taut.warm.key" . }}, {{ int $warm.waitSeconds | quote }}]
  volumeMounts:
    - {name: compile-cache, mountPath: /compile-cache, readOnly: true}
{{- end }}
{{- end }}

{{/* Ready to serve is who answers a prompt with the right token; loading and compiling take minutes. Context: as the pod's. */}}
{{- define "taut.worker.startupProbe" -}}
{{- $worker := .root.Values.worker -}}
{{- if eq $worker.startup "token" }}
{{- $golden := default .root.Values.model.gateway.golden (dig "gateway" "golden" dict .variant) }}
{{- $command := list "python3" "/etc/taut/scripts/startup_probe.py" .root.Values.model.name (include "taut.checkpoint" .variant) }}
{{- with $golden }}{{- $command = concat $command (list .prompt .expected_text) }}{{- end }}
exec:
  command: {{- toYaml $command | nindent 4 }}
timeoutSeconds: 60
{{- else }}
httpGet: {path: /health, port: http}
timeoutSeconds: 3
{{- end }}
periodSeconds: 5
failureThreshold: {{ div (add $worker.startupSeconds 4) 5 }}
{{- end }}

{{/* Of several ranks only the first is asked; the others are ready when it can be reached. Context: as the pod's. */}}
{{- define "taut.worker.probes" -}}
{{- $probes := dict -}}
{{- if eq .rank "follower" -}}
{{- $_ := set $probes "readinessProbe" (include "taut.group.followerProbe" . | fromYaml) -}}
{{- else -}}
{{- $_ := set $probes "startupProbe" (include "taut.worker.startupProbe" . | fromYaml) -}}
{{- $_ := set $probes "readinessProbe" (dict "httpGet" (dict "path" "/health" "port" "http") "periodSeconds" 5 "timeoutSeconds" 3 "failureThreshold" 2) -}}
{{- $_ := set $probes "livenessProbe" (dict "httpGet" (dict "path" "/health" "port" "http") "periodSeconds" 15 "timeoutSeconds" 10 "failureThreshold" 8) -}}
{{- end -}}
{{- range $name, $probe := $probes -}}
{{- $given := default dict (get $.of $name) -}}
{{- if eq $.rank "follower" -}}{{- $given = omit $given "exec" "httpGet" "tcpSocket" "grpc" -}}{{- end -}}
{{- $_ := set $probes $name (include "taut.probe" (list $probe $given) | fromYaml) -}}
{{- end -}}
{{- toYaml $probes -}}
{{- end }}

{{- define "taut.worker.spec" -}}
{{- $worker := .root.Values.worker -}}
{{- $token := and (ne .rank "follower") (eq $worker.startup "token") -}}
serviceAccountName: {{ include "taut.worker.account" .root | quote }}
# Leaving the Service, then vLLM's own drain, then time to end its processes.
terminationGracePeriodSeconds: {{ add $worker.deregisterSeconds $worker.drainSeconds 30 }}
{{- if eq .rank "single" }}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "taut.component.selector" (dict "root" .root "component" "worker") | nindent 8 }}
        taut/variant: {{ .variant.name | quote }}
{{- end }}
initContainers: {{- include "taut.worker.init" . | nindent 2 }}
containers:
  - name: worker
    image: {{ include "taut.image" (dict "root" .root "image" .root.Values.image.worker) }}
    {{- if ne .rank "single" }}
    {{- include "taut.group.command" . | nindent 4 }}
    {{- end }}
    {{- if not (and (eq .rank "follower") (eq .variant.multiNode.engine "ray")) }}
    args: {{- include "taut.worker.args" . | nindent 6 }}
    {{- end }}
    securityContext: {readOnlyRootFilesystem: {{ $worker.readOnlyRootFilesystem }}}
    env: {{- include "taut.worker.env" . | nindent 6 }}
    {{- if ne .rank "follower" }}
    ports:
      - {name: http, containerPort: 8000}
    lifecycle:
      preStop:
        exec: {command: [sleep, {{ $worker.deregisterSeconds | quote }}]}
    {{- end }}
    {{- include "taut.worker.probes" . | nindent 4 }}
    resources: {{- include "taut.resources" (dict "resources" .of.resources "gpus" .of.gpus "gpuResource" .of.gpuResource "claims" .of.resourceClaims) | nindent 6 }}
    volumeMounts:
      {{- include "taut.worker.mounts" (dict "root" .root "variant" .variant "writes" (not $worker.cache.warm.enabled)) | trim | nindent 6 }}
      {{- if $token }}
      - {name: scripts, mountPath: /etc/taut/scripts, readOnly: true}
      {{- end }}
volumes:
  {{- include "taut.worker.volumes" . | trim | nindent 2 }}
  {{- if $token }}
  - name: scripts
    configMap: {name: {{ include "taut.fullname" .root }}-scripts}
  {{- end }}
{{- end }}

{{/* Pods that mount a claim of one node keep together. Context: as the pod's, with of. */}}
{{- define "taut.worker.placed" -}}
{{- $of := .of -}}
{{- if include "taut.worker.onStore" . -}}
{{- $_ := set $of "affinity" (include "taut.affinity" (dict "root" .root "own" $of.affinity) | fromYaml) -}}
{{- end -}}
{{- toYaml $of -}}
{{- end }}

{{- define "taut.worker.pod" -}}
{{- $of := include "taut.worker.of" . | fromYaml -}}
{{- $context := merge (dict "of" $of) . -}}
{{- include "taut.pod" (dict "root" .root "of" (include "taut.worker.placed" $context | fromYaml) "labels" (include "taut.worker.labels" . | fromYaml) "spec" (include "taut.worker.spec" $context) "gpus" (int (default 0 $of.gpus)) "gpuResource" $of.gpuResource "resources" $of.resources) -}}
{{- end }}
