{{/* The pod of one worker. Context: {root, variant, rank}; rank: single, leader or follower. */}}
{{- define "taut.worker.labels" -}}
{{ include "taut.component.selector" (dict "root" .root "component" "worker") }}
taut/variant: {{ .variant.name }}
taut/serves: {{ ne .rank "follower" | quote }}
{{- end }}

{{/* taut worker's own arguments, then vLLM's; of several nodes only the first has an API. */}}
{{- define "taut.worker.args" -}}
{{- $args := list "worker" (include "taut.checkpoint" .variant) "--name" .root.Values.model.name "--host" "$(POD_IP)" "--port" "8000" -}}
{{- $args = concat $args (list "--shutdown-timeout" (toString (int .root.Values.worker.drainSeconds))) -}}
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
{{- if ne .rank "single" -}}
{{- $rank := ternary "0" "$(LWS_WORKER_INDEX)" (eq .rank "leader") -}}
{{- $vllm = concat $vllm (list "--nnodes" (toString (int $variant.multiNode.size)) "--node-rank" $rank "--master-addr" "$(LWS_LEADER_ADDRESS)") -}}
{{- if eq .rank "follower" -}}{{- $vllm = append $vllm "--headless" -}}{{- end -}}
{{- end -}}
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
{{- if include "taut.cache.claim" .root }}
- {name: TAUT_COMPILE_CACHE, value: /compile-cache}
{{- end }}
{{- range $name, $value := default dict .variant.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
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
- name: models
  persistentVolumeClaim: {claimName: {{ include "taut.modelStore.claim" .root }}}
{{- end }}
- name: cache
  emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- with include "taut.cache.claim" .root }}
- name: compile-cache
  persistentVolumeClaim: {claimName: {{ . }}}
{{- end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ default .root.Values.worker.shmSize .variant.shmSize }}}
# A warm compile cache that is mounted read-only is copied here.
- name: tmp
  emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- end }}

{{/* A checkpoint gets its name by a rename when it is complete, so one file tells enough. Context: {root, variant}. */}}
{{- define "taut.worker.wait" -}}
- name: wait-for-checkpoint
  {{- include "taut.worker.waiter" . | nindent 2 }}
  command: [sh, -c, 'until test -f "$0"; do sleep 2; done']
  args: [{{ include "taut.checkpoint" .variant }}/config.json]
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
{{- end }}

{{/* Context: {root}. */}}
{{- define "taut.worker.waiter" -}}
image: {{ include "taut.image" (dict "root" .root "of" "worker") }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{ include "taut.container.security" true }}
resources:
  requests: {cpu: 10m, memory: 16Mi}
  limits: {memory: 64Mi}
{{- end }}

{{/* Context: as the pod's. */}}
{{- define "taut.worker.init" -}}
{{- $warm := .root.Values.worker.cache.warm -}}
{{- if and .root.Values.prepare.enabled (not .variant.artifact) }}
{{ include "taut.worker.wait" . }}
{{- end }}
{{- if and $warm.enabled (eq .rank "single") }}
# Two compilers for the same kernels help nobody; but serving cold is better than not at all.
- name: wait-for-cache
  {{- include "taut.worker.waiter" . | nindent 2 }}
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
startupProbe:
  {{- if eq $worker.startup "token" }}
  {{- $golden := default .root.Values.model.gateway.golden (dig "gateway" "golden" dict .variant) }}
  {{- $command := list "python3" "/etc/taut/scripts/startup_probe.py" .root.Values.model.name (include "taut.checkpoint" .variant) }}
  {{- with $golden }}{{- $command = concat $command (list .prompt .expected_text) }}{{- end }}
  exec:
    command: {{- toYaml $command | nindent 6 }}
  timeoutSeconds: 60
  {{- else }}
  httpGet: {path: /health, port: http}
  timeoutSeconds: 3
  {{- end }}
  periodSeconds: 5
  failureThreshold: {{ div (add $worker.startupSeconds 4) 5 }}
{{- end }}

{{- define "taut.worker.pod" -}}
{{- $worker := .root.Values.worker -}}
{{- $variant := .variant -}}
{{- $gpus := int (default 0 $variant.gpus) -}}
{{- $token := and (ne .rank "follower") (eq $worker.startup "token") -}}
metadata:
  labels:
    {{- include "taut.worker.labels" . | nindent 4 }}
    {{- include "taut.store.label" . | nindent 4 }}
    {{- with .root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "taut.pod.common" .root | nindent 2 }}
  serviceAccountName: {{ include "taut.fullname" .root }}-worker
  automountServiceAccountToken: false
  {{- with $worker.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # Leaving the Service, then vLLM's own drain, then time to end its processes.
  terminationGracePeriodSeconds: {{ add $worker.deregisterSeconds $worker.drainSeconds 30 }}
  {{- if eq .rank "single" }}
  topologySpreadConstraints:
    - topologyKey: kubernetes.io/hostname
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "taut.component.selector" (dict "root" .root "component" "worker") | nindent 10 }}
          taut/variant: {{ $variant.name }}
  {{- end }}
  {{- include "taut.placement" (dict "of" $variant "gpus" $gpus "gpuResource" $worker.gpuResource "affinity" (include "taut.worker.affinity" .)) | nindent 2 }}
  {{- with include "taut.worker.init" . | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "taut.image" (dict "root" .root "of" "worker") }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: {{- include "taut.worker.args" . | nindent 8 }}
      {{- include "taut.container.security" $worker.readOnlyRootFilesystem | nindent 6 }}
      env: {{- include "taut.worker.env" . | nindent 8 }}
      {{- if ne .rank "follower" }}
      ports:
        - {name: http, containerPort: 8000}
      {{- include "taut.worker.startupProbe" . | nindent 6 }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 8
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ $worker.deregisterSeconds | quote }}]}
      {{- end }}
      resources: {{- include "taut.resources" (dict "resources" $variant.resources "gpus" $gpus "gpuResource" $worker.gpuResource) | nindent 8 }}
      volumeMounts:
        {{- include "taut.worker.mounts" (dict "root" .root "variant" $variant "writes" (not $worker.cache.warm.enabled)) | trim | nindent 8 }}
        {{- if $token }}
        - {name: scripts, mountPath: /etc/taut/scripts, readOnly: true}
        {{- end }}
  volumes:
    {{- include "taut.worker.volumes" . | trim | nindent 4 }}
    {{- if $token }}
    - name: scripts
      configMap: {name: {{ include "taut.fullname" .root }}-scripts}
    {{- end }}
{{- end }}
