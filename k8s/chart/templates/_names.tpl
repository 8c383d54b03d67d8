{{/* Names and labels. Lengths: release part 30, variant 24, so that every Service name fits into 63. */}}
{{- define "taut.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{/* A Service's name is a DNS label: no dots, a letter first. */}}
{{- define "taut.fullname" -}}
{{- $name := include "taut.name" . -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- $full := printf "%s-%s" $release $name -}}
{{- if contains $name $release -}}{{- $full = $release -}}{{- end -}}
{{- if regexMatch "^[0-9]" $full -}}{{- $full = printf "%s-%s" (ternary .Chart.Name $name (regexMatch "^[0-9]" $name)) $release -}}{{- end -}}
{{- default ($full | trunc 30 | trimSuffix "-") .Values.fullnameOverride -}}
{{- end }}

{{- define "taut.namespace" -}}{{ default .Release.Namespace .Values.namespaceOverride }}{{- end }}

{{- define "taut.gateway.name" -}}{{ include "taut.fullname" . }}-gateway{{- end }}

{{/* Context: {root, variant}. */}}
{{- define "taut.worker.name" -}}{{ include "taut.fullname" .root }}-worker-{{ .variant.name }}{{- end }}

{{/*
Not the Service's name: LeaderWorkerSet makes a headless Service of its own name, in which ranks find each other before they
are ready, and makes none where a Service of that name is there. Context: {root, variant}.
*/}}
{{- define "taut.group.name" -}}{{ include "taut.fullname" .root }}-ranks-{{ .variant.name }}{{- end }}

{{- define "taut.selector" -}}
app.kubernetes.io/name: {{ include "taut.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Context: {root, component}. */}}
{{- define "taut.component.selector" -}}
{{ include "taut.selector" .root }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end }}

{{/*
Name, namespace, labels and annotations of an object. Context: {root, name, component, labels, annotations}; without a
component it belongs to the release.
*/}}
{{- define "taut.metadata" -}}
{{- $labels := merge (include "taut.selector" .root | fromYaml) (dict "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_")) -}}
{{- with .component -}}{{- $_ := set $labels "app.kubernetes.io/component" . -}}{{- end -}}
{{- $labels = merge $labels (default dict .labels) (default dict .root.Values.commonLabels) -}}
{{- $annotations := merge (deepCopy (default dict .annotations)) (default dict .root.Values.commonAnnotations) -}}
name: {{ .name }}
{{- with .root.Values.namespaceOverride }}
namespace: {{ . | quote }}
{{- end }}
labels: {{- toYaml $labels | nindent 2 }}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "taut.worker.account" -}}
{{- include "taut.account" (dict "of" .Values.worker "name" (printf "%s-worker" (include "taut.fullname" .))) -}}
{{- end }}

{{/* The account of a component's pods: the user's, or the one that is made. Context: {of, name}. */}}
{{- define "taut.account" -}}
{{- default .name (dig "serviceAccount" "name" "" (default dict .of)) -}}
{{- end }}

{{/* A digest wins over a tag, a tag over the chart's appVersion. Context: {root, image}. */}}
{{- define "taut.image" -}}
{{- $repository := .image.repository -}}
{{- with dig "imageRegistry" "" (default dict .root.Values.global) -}}
{{- $parts := splitList "/" $repository -}}
{{- if and (gt (len $parts) 1) (regexMatch "[.:]|^localhost$" (first $parts)) -}}{{- $parts = rest $parts -}}{{- end -}}
{{- $repository = printf "%s/%s" . (join "/" $parts) -}}
{{- end -}}
{{- if hasPrefix "registry.invalid/" $repository -}}
{{- fail (printf "global.imageRegistry: %s is a placeholder that no registry can hold; set the registry that has your images (docker/README.md, Release), or each image.*.repository" $repository) -}}
{{- end -}}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}:{{ default .root.Chart.AppVersion .image.tag }}
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

