{{/* The pod of an engine: alone, leader or worker. Arguments: root, part, spec, script ("" for one node). */}}
{{- define "trtspec.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
metadata:
  labels:
    {{- include "trtspec.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .part }}
    {{- with include "trtspec.claimLabel" $root }}{{ . | nindent 4 }}{{ end }}
    {{- with $v.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    # of this part alone: another part that changes or scales restarts nothing here
    checksum/config: {{ toYaml (list .spec.engineConfig .script ($root.Files.Glob "scripts/*").AsConfig) | sha256sum }}
    {{- with $v.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- include "trtspec.podHead" $root | nindent 2 }}
  {{- include "trtspec.placement" (dict "root" $root "part" .part) | trim | nindent 2 }}
  {{- $claims := $v.resourceClaims }}
  {{- if $v.computeDomain.enabled }}
  {{- $claims = append $claims (dict "name" "compute-domain-channel" "resourceClaimTemplateName" (printf "%s-channel" (include "trtspec.fullname" $root))) }}
  {{- end }}
  {{- with $claims }}
  resourceClaims: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $complete := include "trtspec.complete" $root }}
  {{- if or $complete $v.extraInitContainers }}
  initContainers:
    {{- with $complete }}
    {{- include "trtspec.models" (dict "root" $root "file" .) | nindent 4 }}
    {{- end }}
    {{- with $v.extraInitContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    - name: server
      image: {{ include "trtspec.image" $v.image }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      # no command: the image's own entrypoint prepares the driver's libraries, then runs the arguments
      args:
        {{- with .script }}
        - bash
        - /etc/trtspec/{{ . }}
        {{- end }}
        {{- if ne .script "worker.sh" }}
        {{- include "trtspec.serve" . | nindent 8 }}
        {{- end }}
      env:
        {{- include "trtspec.env" $root | nindent 8 }}
        {{- if .script }}
        - {name: TRTSPEC_SSH_PORT, value: {{ $v.ssh.port | quote }}}
        {{- end }}
        {{- with $v.server.env }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $v.server.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if ne .script "worker.sh" }}
      ports:
        - {name: http, containerPort: 8000}
      {{- include "trtspec.probes" (dict "root" $root) | nindent 6 }}
      {{- end }}
      {{- $devices := dict "nvidia.com/gpu" (.spec.gpusPerNode | toString) }}
      {{- with $v.rdma.resource }}{{ $_ := set $devices . ($v.rdma.count | toString) }}{{ end }}
      resources:
        requests: {{- merge (dict "cpu" ($v.resources.cpu | toString) "memory" $v.resources.memory) $devices | toYaml | nindent 10 }}
        limits: {{- merge (deepCopy $v.resources.limits) $devices | toYaml | nindent 10 }}
        {{- with $claims }}
        claims:
          {{- range . }}
          - {name: {{ .name }}}
          {{- end }}
        {{- end }}
      {{- $security := deepCopy $v.securityContext }}
      {{- if $v.rdma.resource }}
      {{- $capabilities := get $security "capabilities" | default (dict) }}
      {{- $_ := set $capabilities "add" (append (get $capabilities "add" | default list) "IPC_LOCK") }}
      {{- $_ := set $security "capabilities" $capabilities }}
      {{- end }}
      securityContext: {{- toYaml $security | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models{{ if eq $v.cache.type "objectStore" }}, readOnly: true{{ end }}}
        - {name: config, mountPath: /etc/trtspec, readOnly: true}
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if .script }}
        - {name: ssh, mountPath: /etc/trtspec-ssh, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    {{- include "trtspec.modelsVolume" $root | nindent 4 }}
    - name: config
      configMap: {name: {{ include "trtspec.fullname" $root }}}
    - name: cache
      emptyDir: {}
    - name: tmp
      emptyDir: {}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ default (printf "%dGi" (div (mul $v.model.sizeGiB 7) 6)) $v.resources.sharedMemory }}
    {{- if .script }}
    - name: ssh
      secret: {secretName: {{ $v.ssh.existingSecret }}, defaultMode: 288}
    {{- end }}
    {{- with $v.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{/* The command of an engine. Sizes and trust in the target's code are on the first line of its file. */}}
{{- define "trtspec.serve" -}}
{{- $v := .root.Values -}}
- trtspec
- serve
- {{ $v.model.target | quote }}
- --config
- /etc/trtspec/{{ ternary "engine" .part (eq .part "server") }}.yml
- --host
- 0.0.0.0
- --port
- "8000"
{{- if .script }}
- --launcher
- lws
- --nodes
- {{ .spec.nodes | quote }}
- --gpus-per-node
- {{ .spec.gpusPerNode | quote }}
{{- end }}
{{ include "trtspec.limits" .root }}
{{- range $v.server.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "trtspec.limits" -}}
- --startup-timeout
- {{ include "trtspec.startupSeconds" . | quote }}
- --stop-grace
- {{ .Values.shutdown.stopSeconds | quote }}
{{- end -}}

{{/* Seconds until a server is ready: as long as the cache needs to deliver the checkpoint, and the warm-up. */}}
{{- define "trtspec.startupSeconds" -}}
{{- add (div (mul .Values.model.sizeGiB 1024) .Values.probes.loadMiBPerSecond) .Values.probes.warmupSeconds -}}
{{- end -}}

{{- define "trtspec.podHead" -}}
{{- $v := .Values -}}
serviceAccountName: {{ include "trtspec.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $v.shutdown.drainSeconds $v.shutdown.stopSeconds 30 }}
{{- with $v.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- end -}}

{{- define "trtspec.env" -}}
- {name: HOME, value: /cache}
- {name: HF_HOME, value: /models}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: HF_MODULES_CACHE, value: /cache/modules}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: FLASHINFER_WORKSPACE_BASE, value: /cache/flashinfer}
- {name: PYTHONUNBUFFERED, value: "1"}
- {name: TRTSPEC_PROGRESS, value: "1"}
{{- end -}}

{{/* They cost the engine nothing, and a busy server passes them. Argument: root. */}}
{{- define "trtspec.probes" -}}
{{- $p := .root.Values.probes -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: {{ $p.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ add1 (div (include "trtspec.startupSeconds" .root | int) $p.periodSeconds) }}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: {{ $p.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 6
lifecycle:
  preStop:
    exec: {command: [python3, /etc/trtspec/drain.py, {{ .root.Values.shutdown.drainSeconds | quote }}]}
{{- end -}}

{{/* Ends at once where the checkpoint is missing: GPUs do not wait for a download. Arguments: root, file. */}}
{{- define "trtspec.models" -}}
- name: models
  image: {{ include "trtspec.image" .root.Values.image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [bash, -c]
  args:
    - {{ printf "[ -e %s ] || { echo '%s is missing: the checkpoint is not in the cache. Install with stage=models first and wait for its Jobs.' >&2; exit 1; }" .file .file | quote }}
  securityContext: {{- toYaml .root.Values.securityContext | nindent 4 }}
  resources: {requests: {cpu: 100m, memory: 64Mi}}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
{{- end -}}
