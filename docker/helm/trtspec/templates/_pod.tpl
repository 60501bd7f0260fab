{{/* The pod of a server: alone, leader or worker. Argument: root, and script ("" for one node). */}}
{{- define "trtspec.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
metadata:
  labels:
    {{- include "trtspec.labels" $root | nindent 4 }}
    app.kubernetes.io/component: server
  annotations:
    checksum/engine-config: {{ $v.engineConfig | sha256sum }}
    {{- with $v.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "trtspec.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- include "trtspec.placement" $root | trim | nindent 2 }}
  {{- with include "trtspec.complete" $root }}
  initContainers:
    {{- include "trtspec.wait" (dict "root" $root "image" (include "trtspec.image" $root) "file" .) | nindent 4 }}
  {{- end }}
  containers:
    - name: server
      image: {{ include "trtspec.image" $root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      # no command: the image's own entrypoint prepares the driver's libraries, then runs the arguments
      args:
        {{- with .script }}
        - bash
        - /etc/trtspec/{{ . }}
        {{- end }}
        {{- if ne .script "worker.sh" }}
        - trtllm-serve
        - {{ $v.model.target | quote }}
        {{- range $v.server.args }}
        - {{ . | quote }}
        {{- end }}
        - --extra_llm_api_options
        - /etc/trtspec/engine.yml
        {{- end }}
      env:
        - {name: HOME, value: /cache}
        - {name: HF_HOME, value: /models}
        - {name: HF_HUB_OFFLINE, value: "1"}
        - {name: HF_MODULES_CACHE, value: /cache/modules}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        - {name: FLASHINFER_WORKSPACE_BASE, value: /cache/flashinfer}
        - {name: PYTHONUNBUFFERED, value: "1"}
        {{- if .script }}
        - {name: TRTSPEC_GPUS_PER_NODE, value: {{ $v.gpusPerNode | quote }}}
        - {name: TRTSPEC_SSH_PORT, value: {{ $v.ssh.port | quote }}}
        {{- end }}
        {{- with $v.server.env }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- if ne .script "worker.sh" }}
      ports:
        - {name: http, containerPort: {{ include "trtspec.port" $root }}}
      {{- include "trtspec.probes" $root | nindent 6 }}
      {{- end }}
      resources:
        requests:
          cpu: {{ $v.resources.cpu | quote }}
          memory: {{ $v.resources.memoryGiB }}Gi
          nvidia.com/gpu: {{ $v.gpusPerNode | quote }}
        limits:
          nvidia.com/gpu: {{ $v.gpusPerNode | quote }}
      securityContext: {{- toYaml $v.securityContext | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: engine-config, mountPath: /etc/trtspec, readOnly: true}
        - {name: cache, mountPath: /cache}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if .script }}
        - {name: ssh, mountPath: /etc/trtspec-ssh, readOnly: true}
        {{- end }}
  volumes:
    - name: models
      persistentVolumeClaim: {claimName: {{ include "trtspec.claim" $root }}}
    - name: engine-config
      configMap: {name: {{ include "trtspec.fullname" $root }}}
    - name: cache
      emptyDir: {}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ default (div (mul $v.model.sizeGiB 7) 6) $v.resources.sharedMemoryGiB }}Gi
    {{- if .script }}
    - name: ssh
      secret: {secretName: {{ $v.ssh.existingSecret }}, defaultMode: 288}
    {{- end }}
{{- end -}}

{{/* Startup: as long as the claim needs to deliver the checkpoint, and the warm-up. Alive and ready are /health: a probe
     that generates would kill a busy server. */}}
{{- define "trtspec.probes" -}}
{{- $p := .Values.probes -}}
{{- $seconds := add (div (mul .Values.model.sizeGiB 1024) $p.loadMiBPerSecond) $p.warmupSeconds -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: {{ $p.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ add1 (div $seconds $p.periodSeconds) }}
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
{{- end -}}

{{- define "trtspec.placement" -}}
{{- $selector := deepCopy .Values.nodeSelector -}}
{{- with .Values.gpuProduct -}}
{{- $_ := set $selector "nvidia.com/gpu.product" (index $.Values.gpuProductLabels .) -}}
{{- end -}}
{{- with $selector -}}
nodeSelector: {{- toYaml . | nindent 2 }}
{{ end -}}
{{- with .Values.tolerations -}}
tolerations: {{- toYaml . | nindent 2 }}
{{ end -}}
{{- with .Values.affinity -}}
affinity: {{- toYaml . | nindent 2 }}
{{ end -}}
{{- end -}}

{{- define "trtspec.wait" -}}
- name: checkpoint
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [bash, -c, {{ printf "until [ -e %s ]; do echo waiting for %s; sleep 15; done" .file .file | quote }}]
  securityContext: {{- toYaml .root.Values.securityContext | nindent 4 }}
  resources: {requests: {cpu: 100m, memory: 64Mi}}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
{{- end -}}

{{/* Head of a Job's pod; its containers follow. */}}
{{- define "trtspec.jobPod" -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "trtspec.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  restartPolicy: OnFailure
  serviceAccountName: {{ include "trtspec.serviceAccount" .root }}
  automountServiceAccountToken: false
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- toYaml $v.podSecurityContext | nindent 4 }}
  volumes:
    - name: models
      persistentVolumeClaim: {claimName: {{ include "trtspec.claim" .root }}}
    - name: tmp
      emptyDir: {}
{{- end -}}
