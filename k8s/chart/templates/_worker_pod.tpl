{{/* The pod of one worker. Context: {root, variant, rank}; rank: single, leader or follower. */}}
{{- define "taut.worker.labels" -}}
{{ include "taut.component.selector" (dict "root" .root "component" "worker") }}
taut/variant: {{ .variant.name }}
taut/serves: {{ ne .rank "follower" | quote }}
{{- end }}

{{/* taut worker's own arguments, then vLLM's; of several nodes only the first has an API. */}}
{{- define "taut.worker.args" -}}
{{- $variant := .variant -}}
{{- $args := list "worker" (printf "/models/%s" $variant.checkpoint) "--name" .root.Values.model.name "--host" "$(POD_IP)" "--port" "8000" -}}
{{- $args = concat $args (list "--max-model-len" (toString (int .root.Values.model.maxModelLen)) "--shutdown-timeout" (toString (int .root.Values.worker.drainSeconds))) -}}
{{- with $variant.kvCacheDtype -}}{{- $args = concat $args (list "--kv-cache-dtype" .) -}}{{- end -}}
{{- with $variant.kvCacheGib -}}{{- $args = concat $args (list "--kv-cache-gib" (toString (int .))) -}}{{- end -}}
{{- with $variant.kernels -}}{{- $args = concat $args (list "--kernels" .) -}}{{- end -}}
{{- $vllm := default list $variant.vllmArgs -}}
{{- if ne .rank "single" -}}
{{- $rank := ternary "0" "$(LWS_WORKER_INDEX)" (eq .rank "leader") -}}
{{- $vllm = concat $vllm (list "--nnodes" (toString (int $variant.multiNode.size)) "--node-rank" $rank "--master-addr" "$(LWS_LEADER_ADDRESS)") -}}
{{- if eq .rank "follower" -}}{{- $vllm = append $vllm "--headless" -}}{{- end -}}
{{- end -}}
{{- if $vllm -}}{{- $args = concat $args (list "--") $vllm -}}{{- end -}}
{{- toYaml $args -}}
{{- end }}

{{- define "taut.worker.pod" -}}
{{- $worker := .root.Values.worker -}}
{{- $variant := .variant -}}
{{- $gpus := int (default 0 $variant.gpus) -}}
metadata:
  labels:
    {{- include "taut.worker.labels" . | nindent 4 }}
    taut/store: mounted
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
  {{- include "taut.placement" (dict "of" $variant "gpus" $gpus "gpuResource" $worker.gpuResource "affinity" (include "taut.affinity" (dict "root" .root "own" $variant.affinity))) | nindent 2 }}
  {{- if .root.Values.prepare.enabled }}
  initContainers:
    # A checkpoint gets its name by a rename when it is complete, so one file tells enough.
    - name: wait-for-checkpoint
      image: {{ include "taut.image" (dict "root" .root "of" "worker") }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [sh, -c, 'until test -f "$0"; do sleep 2; done']
      args: [/models/{{ $variant.checkpoint }}/config.json]
      {{- include "taut.container.security" true | nindent 6 }}
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 64Mi}
      volumeMounts:
        - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "taut.image" (dict "root" .root "of" "worker") }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [taut]
      args: {{- include "taut.worker.args" . | nindent 8 }}
      {{- include "taut.container.security" $worker.readOnlyRootFilesystem | nindent 6 }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: TAUT_HOME, value: /models}
        - {name: HOME, value: /cache}
        - {name: VLLM_CACHE_ROOT, value: /cache/vllm}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        - {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
        {{- range $name, $value := default dict $variant.env }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      {{- if ne .rank "follower" }}
      ports:
        - {name: http, containerPort: 8000}
      # Loading and compiling take minutes; whether the first token is right is asked by the gateway.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: {{ div (add $worker.startupSeconds 4) 5 }}
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
        - {name: models, mountPath: /models, readOnly: true}
        - {name: cache, mountPath: /cache}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
  volumes:
    - name: models
      persistentVolumeClaim: {claimName: {{ include "taut.modelStore.claim" .root }}}
    - name: cache
      {{- if $worker.cache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ $worker.cache.existingClaim }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $worker.cache.sizeLimit }}}
      {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ default $worker.shmSize $variant.shmSize }}}
    - name: tmp
      emptyDir: {sizeLimit: 2Gi}
{{- end }}
