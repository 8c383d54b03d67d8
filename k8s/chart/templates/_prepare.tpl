{{/* hook, argocd or pod; empty if nothing is prepared. A store that is a pod's own is filled by that pod. Context: the root. */}}
{{- define "taut.prepare.run" -}}
{{- if .Values.prepare.enabled -}}
{{- ternary .Values.prepare.run "pod" (eq (include "taut.store.kind" .) "claim") -}}
{{- end -}}
{{- end }}

{{/*
What makes an object be there before any worker: a hook of Helm's, or a wave of Argo CD's. Argo CD would take Helm's hook for
one of its own, and delete the claim before each sync: there it is left out. Context: {root, weight, claim}.
*/}}
{{- define "taut.prepare.when" -}}
{{- $run := include "taut.prepare.run" .root -}}
{{- if eq $run "hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ .weight | quote }}
{{- if .claim }}
# Made only where it is missing, so never deleted to be made again; any word but Helm's three means just that.
helm.sh/hook-delete-policy: never
argocd.argoproj.io/hook: Skip
{{- else }}
helm.sh/hook-delete-policy: before-hook-creation
{{- end }}
{{- else if eq $run "argocd" -}}
# One wave for all: a claim stays Pending until its first pod, and a wave of its own would never end.
argocd.argoproj.io/sync-wave: "-1"
{{- end -}}
{{- end }}

{{/* The model as the later steps name it. Context: the root. */}}
{{- define "taut.prepare.source" -}}
{{- $model := .Values.model -}}
{{- if $model.revision -}}
/models/pinned/{{ base $model.source }}-{{ trunc 12 $model.revision }}
{{- else -}}
{{ $model.source }}
{{- end -}}
{{- end }}

{{/* Environment and mounts of every step. Context: {root, env, envFrom, gpus, claims}. */}}
{{- define "taut.prepare.step" -}}
{{- $prepare := .root.Values.prepare -}}
image: {{ include "taut.image" (dict "root" .root "image" .root.Values.image.toolbox) }}
env:
  - {name: TAUT_HOME, value: /models}
  - {name: HOME, value: /scratch}
  {{- if $prepare.hubToken.existingSecret }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ $prepare.hubToken.existingSecret | quote }}, key: {{ $prepare.hubToken.key | quote }}}}
  {{- end }}
  {{- with include "taut.env" (default list .env) | fromYamlArray }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
resources: {{- include "taut.resources" (dict "resources" $prepare.resources "gpus" .gpus "gpuResource" .root.Values.worker.gpuResource "claims" .claims) | nindent 2 }}
volumeMounts: {{- include "taut.prepare.mounts" . | nindent 2 }}
{{- end }}

{{- define "taut.prepare.mounts" -}}
- {name: models, mountPath: /models}
- {name: scratch, mountPath: /scratch}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{/*
One step after the other; each finds what an interrupted run left and continues there, and does nothing where all is done.
Context: {root, variants, env, envFrom, claims}.
*/}}
{{- define "taut.prepare.steps" -}}
{{- $prepare := .root.Values.prepare -}}
{{- $model := .root.Values.model -}}
{{- $step := include "taut.prepare.step" . -}}
{{- range $number, $directory := $prepare.copy.directories }}
{{ include "taut.prepare.copy" (dict "root" $.root "number" $number "directory" $directory "env" $.env "envFrom" $.envFrom) }}
{{- range $.variants }}
{{- if and (eq (default "" .checkpoint) $directory.to) (not .artifact) }}
# Workers only read the store: what is found here they need not read again.
- name: verify-{{ $number }}
  {{- $step | nindent 2 }}
  args: [model, verify, {{ printf "/models/%s" $directory.to | quote }}]
{{- break }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $model.source $model.revision }}
# One commit of the hub's repository, in a directory of its own.
- name: fetch
  {{- $step | nindent 2 }}
  command: [python3, -c, 'import sys; from huggingface_hub import snapshot_download as get; get(sys.argv[1], revision=sys.argv[2], local_dir=sys.argv[3], ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])']
  args: [{{ $model.source | quote }}, {{ $model.revision | quote }}, {{ include "taut.prepare.source" .root | quote }}]
{{- else if $model.source }}
- name: fetch
  {{- $step | nindent 2 }}
  args: [model, fetch, {{ $model.source | quote }}]
{{- end }}
{{- range .variants }}
{{- if .recipe }}
- name: compress-{{ .name }}
  {{- include "taut.prepare.step" (dict "root" $.root "env" $.env "envFrom" $.envFrom "gpus" $prepare.gpus "claims" $.claims) | nindent 2 }}
  args: {{- concat (list "compress" (include "taut.prepare.source" $.root) "--recipe" .recipe "--output" (printf "/models/%s" .checkpoint) "--device" $prepare.device) $prepare.compressArgs | toYaml | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}

{{/*
A directory from S3 or whatever else rclone reads. It arrives beside its place and is renamed when it is whole, since
workers take a config.json for a checkpoint; what is in place already is not copied again. Context: {root, number, directory}.
*/}}
{{- define "taut.prepare.copy" -}}
{{- $copy := .root.Values.prepare.copy -}}
{{- $arriving := printf "/models/.arriving/%s" .directory.to -}}
{{- $place := printf "/models/%s" .directory.to -}}
- name: copy-{{ .number }}
  image: {{ include "taut.image" (dict "root" .root "image" $copy.image) }}
  args: [copy, --checksum, --retries, "5", --compare-dest, {{ $place | quote }}, {{ .directory.from | quote }}, {{ $arriving | quote }}]
  env:
    - {name: HOME, value: /scratch}
    - {name: RCLONE_CONFIG, value: /scratch/rclone.conf}
    {{- with concat (include "taut.env" $copy.env | fromYamlArray) (include "taut.env" (default list .env) | fromYamlArray) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $from := default list .envFrom }}
  {{- with $copy.existingSecret }}{{ $from = prepend $from (dict "secretRef" (dict "name" .)) }}{{ end }}
  {{- with $from }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  resources: {{- toYaml .root.Values.prepare.resources | nindent 4 }}
  volumeMounts: {{- include "taut.prepare.mounts" . | nindent 4 }}
- name: place-{{ .number }}
  image: {{ include "taut.image" (dict "root" .root "image" .root.Values.image.toolbox) }}
  command: [sh, -c, 'test -e "$1" || { mkdir -p "$(dirname "$1")" && mv "$0" "$1"; }']
  args: [{{ $arriving | quote }}, {{ $place | quote }}]
  volumeMounts:
    - {name: models, mountPath: /models}
{{- end }}

{{/*
GPUs that the Job holds although it does not compute on them: while the volume has no node yet, only a pod that fits where a
worker fits may choose one. Context: the root.
*/}}
{{- define "taut.prepare.held" -}}
{{- $held := dict -}}
{{- $claim := lookup "v1" "PersistentVolumeClaim" (include "taut.namespace" .) (include "taut.store.claim" .) -}}
{{- if and .Values.prepare.holdGpus (include "taut.store.oneNode" .) (not (dig "spec" "volumeName" "" (default dict $claim))) -}}
{{- range .Values.variants -}}
{{- if not (or .artifact .urls .multiNode) -}}
{{- range $resource, $count := include "taut.gpus" (include "taut.worker.of" (dict "root" $ "variant" .) | fromYaml) | fromYaml -}}
{{- $_ := set $held $resource (max (int $count) (int (get $held $resource))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $held -}}
{{- end }}
