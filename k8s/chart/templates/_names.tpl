{{/* Names and labels. Lengths: release part 30, variant 24, so that every Service name fits into 63. */}}
{{- define "taut.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{- define "taut.fullname" -}}
{{- $name := include "taut.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "taut.gateway.name" -}}{{ include "taut.fullname" . }}-gateway{{- end }}

{{/* Context: {root, variant}. */}}
{{- define "taut.worker.name" -}}{{ include "taut.fullname" .root }}-worker-{{ .variant.name }}{{- end }}

{{- define "taut.selector" -}}
app.kubernetes.io/name: {{ include "taut.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "taut.labels" -}}
{{ include "taut.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Context: {root, component}. */}}
{{- define "taut.component.selector" -}}
{{ include "taut.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "taut.component.labels" -}}
{{ include "taut.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* A digest wins over a tag, a tag over the chart's appVersion. Context: {root, of}. */}}
{{- define "taut.image" -}}
{{- $image := index .root.Values.image .of -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end }}

{{/* Where a worker finds its checkpoint. Context: the variant. */}}
{{- define "taut.checkpoint" -}}
{{ ternary "/artifact" "/models" (not (empty .artifact)) }}/{{ .checkpoint }}
{{- end }}

{{/* The claim for compiled code; empty if there is none. Context: the root. */}}
{{- define "taut.cache.claim" -}}
{{- $cache := .Values.worker.cache -}}
{{- if $cache.existingClaim -}}
{{- $cache.existingClaim -}}
{{- else if $cache.size -}}
{{- include "taut.fullname" . }}-compile-cache
{{- end -}}
{{- end }}

{{/* Whether anything lies in the model store. Context: the root. */}}
{{- define "taut.modelStore.used" -}}
{{- $used := or .Values.prepare.enabled .Values.validation.text.path -}}
{{- range .Values.variants -}}{{- if not .artifact -}}{{- $used = true -}}{{- end -}}{{- end -}}
{{- if $used -}}yes{{- end -}}
{{- end }}

{{- define "taut.modelStore.claim" -}}
{{- default (printf "%s-models" (include "taut.fullname" .)) .Values.modelStore.existingClaim -}}
{{- end }}
