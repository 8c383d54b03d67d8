{{/* A model on several nodes: how its ranks find each other. Context: {root, variant, rank, of}. */}}

{{/* What a rank needs to know beside the parallel sizes in vllmArgs. */}}
{{- define "taut.group.args" -}}
{{- $group := .variant.multiNode -}}
{{- $follows := eq .rank "follower" -}}
{{- $args := list -}}
{{- if eq $group.engine "ray" -}}
{{- $args = list "--distributed-executor-backend" "ray" -}}
{{- else if $group.dataParallelSize -}}
{{- $local := div $group.dataParallelSize $group.size -}}
{{- $args = list "--data-parallel-size" (toString (int $group.dataParallelSize)) "--data-parallel-size-local" (toString $local) "--data-parallel-address" "$(LWS_LEADER_ADDRESS)" "--data-parallel-rpc-port" (include "taut.group.port" .) -}}
{{- else -}}
{{- $rank := ternary "$(LWS_WORKER_INDEX)" "0" $follows -}}
{{- $args = list "--nnodes" (toString (int $group.size)) "--node-rank" $rank "--master-addr" "$(LWS_LEADER_ADDRESS)" "--master-port" (include "taut.group.port" .) -}}
{{- end -}}
{{- if $follows -}}{{- $args = append $args "--headless" -}}{{- end -}}
{{- toYaml $args -}}
{{- end }}

{{/* Where the first rank listens for the others. */}}
{{- define "taut.group.port" -}}
{{- $group := .variant.multiNode -}}
{{- ternary 6379 (default 29500 (int (default 0 $group.masterPort))) (and (eq $group.engine "ray") (not $group.masterPort)) -}}
{{- end }}

{{/*
Instead of the image's entry point, where a shell has something to do first: kubelets put variables into arguments, but do not
reckon, so a shell makes the rank at which a follower's data-parallel engines begin. Ray's followers wait for a head that
listens, since one that gives up would take its group with it.
*/}}
{{- define "taut.group.command" -}}
{{- $group := .variant.multiNode -}}
{{- $port := include "taut.group.port" . -}}
{{- $init := "exec $(command -v tini >/dev/null && echo tini --)" -}}
{{- if eq $group.engine "ray" -}}
{{- if eq .rank "leader" -}}
command:
  - sh
  - -c
  - 'ray start --head --port={{ $port }} --node-ip-address="$POD_IP" --disable-usage-stats && {{ $init }} taut "$@"'
  - taut
{{- else -}}
command:
  - sh
  - -c
  - 'until {{ include "taut.group.reaches" . }} 2>/dev/null; do sleep 2; done; {{ $init }} ray start --address="$LWS_LEADER_ADDRESS:{{ $port }}" --node-ip-address="$POD_IP" --disable-usage-stats --block'
{{- end -}}
{{- else if and (eq .rank "follower") $group.dataParallelSize -}}
command:
  - sh
  - -c
  - '{{ $init }} taut "$@" --data-parallel-start-rank "$((LWS_WORKER_INDEX * {{ div $group.dataParallelSize $group.size }}))"'
  - taut
{{- end -}}
{{- end }}

{{- define "taut.group.reaches" -}}
python3 -c "import os, socket; socket.create_connection((os.environ[\"LWS_LEADER_ADDRESS\"], {{ include "taut.group.port" . }}), 3)"
{{- end }}

{{/* A follower has no API. */}}
{{- define "taut.group.followerProbe" -}}
exec:
  command: [sh, -c, {{ include "taut.group.reaches" . | quote }}]
periodSeconds: 10
timeoutSeconds: 5
failureThreshold: 3
{{- end }}
