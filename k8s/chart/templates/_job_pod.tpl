{{/* Pod parts that the Jobs share. Context: the root. */}}
{{- define "taut.job.head" -}}
{{ include "taut.pod.common" . }}
serviceAccountName: {{ include "taut.fullname" . }}-worker
automountServiceAccountToken: false
restartPolicy: Never
{{- end }}

{{/* Without a command it runs the image's entry point. Context: {root, of}; of is the name of the image. */}}
{{- define "taut.job.container" -}}
image: {{ include "taut.image" (dict "root" .root "of" .of) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{ include "taut.container.security" true }}
{{- end }}

{{- define "taut.prepare.step" -}}
{{- $prepare := .root.Values.prepare -}}
{{ include "taut.job.container" (dict "root" .root "of" "toolbox") }}
args: {{- toYaml .args | nindent 2 }}
env:
  - {name: TAUT_HOME, value: /models}
  - {name: HOME, value: /scratch}
  {{- if $prepare.hubToken.existingSecret }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ $prepare.hubToken.existingSecret }}, key: {{ $prepare.hubToken.key }}}}
  {{- end }}
resources: {{- include "taut.resources" (dict "resources" $prepare.resources "gpus" $prepare.gpus "gpuResource" .root.Values.worker.gpuResource) | nindent 2 }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: scratch, mountPath: /scratch}
  - {name: tmp, mountPath: /tmp}
{{- end }}
