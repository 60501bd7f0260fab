{{/* A Job, named by everything in it: a Job cannot be changed, so another token, image or security context is another
     Job. Arguments: root, component, spec (its text). */}}
{{- define "trtspec.job" -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ include "trtspec.fullname" .root }}-{{ .component }}-{{ .spec | sha256sum | trunc 8 }}
  labels:
    {{- include "trtspec.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  ttlSecondsAfterFinished: {{ .root.Values.jobs.ttlSeconds }}
  {{- .spec | nindent 2 }}
{{- end -}}

{{/* Labels and head of a Job's pod. Arguments: root, component. */}}
{{- define "trtspec.jobMetadata" -}}
labels:
  {{- include "trtspec.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "trtspec.jobHead" -}}
{{- $v := .Values -}}
restartPolicy: OnFailure
serviceAccountName: {{ include "trtspec.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $v.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- end -}}

{{- define "trtspec.downloadJob" -}}
# the download resumes where it was killed
backoffLimit: 6
template:
  metadata:
    {{- include "trtspec.jobMetadata" (dict "root" . "component" "download") | nindent 4 }}
      {{- with include "trtspec.claimLabel" . }}{{ . | nindent 6 }}{{ end }}
  spec:
    {{- include "trtspec.jobHead" . | nindent 4 }}
    {{- include "trtspec.jobPlacement" . | trim | nindent 4 }}
    containers:
      {{- include "trtspec.download" . | nindent 6 }}
    volumes:
      {{- include "trtspec.modelsVolume" . | nindent 6 }}
      - name: tmp
        emptyDir: {}
      {{- with .Values.extraVolumes }}{{ toYaml . | nindent 6 }}{{ end }}
{{- end -}}

{{/* The container that fetches the checkpoints. */}}
{{- define "trtspec.download" -}}
{{- $v := .Values -}}
- name: download
  image: {{ include "trtspec.image" $v.image }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  args:
    - /opt/trtspec/bin/python
    - -c
    - |
      {{- .Files.Get "scripts/download.py" | nindent 6 }}
    - {{ include "trtspec.downloaded" . }}
    {{- range splitList " " (include "trtspec.downloads" .) }}
    - {{ . | quote }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /models}
    - {name: HF_XET_HIGH_PERFORMANCE, value: "1"}
    {{- with $v.hfToken.existingSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $v.hfToken.key }}}}
    {{- end }}
    {{- with $v.download.env }}{{ toYaml . | nindent 4 }}{{ end }}
  securityContext: {{- toYaml $v.securityContext | nindent 4 }}
  resources: {{- toYaml $v.download.resources | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
    {{- with $v.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{- define "trtspec.quantizeJob" -}}
{{- $v := .Values -}}
{{- $done := include "trtspec.quantized" . -}}
# quantize resumes where it was killed
backoffLimit: 20
template:
  metadata:
    {{- include "trtspec.jobMetadata" (dict "root" . "component" "quantize") | nindent 4 }}
      {{- with include "trtspec.claimLabel" . }}{{ . | nindent 6 }}{{ end }}
  spec:
    {{- include "trtspec.jobHead" . | nindent 4 }}
    {{- include "trtspec.jobPlacement" . | trim | nindent 4 }}
    {{- if $v.download.enabled }}
    initContainers:
      - name: download
        image: {{ include "trtspec.image" $v.quantize.image }}
        imagePullPolicy: {{ $v.image.pullPolicy }}
        command: [bash, -c, {{ include "trtspec.downloaded" . | printf "until [ -e %[1]s ]; do echo waiting for %[1]s; sleep 15; done" | quote }}]
        securityContext: {{- toYaml $v.securityContext | nindent 10 }}
        resources: {requests: {cpu: 100m, memory: 64Mi}}
        volumeMounts:
          - {name: models, mountPath: /models, readOnly: true}
    {{- end }}
    containers:
      - name: quantize
        image: {{ include "trtspec.image" $v.quantize.image }}
        imagePullPolicy: {{ $v.image.pullPolicy }}
        command: [bash, -c]
        args:
          - trtspec quantize "$@" && mkdir -p /models/.trtspec && touch {{ $done }}
          - quantize
          - {{ $v.quantize.source | quote }}
          - --output
          - {{ $v.model.target | quote }}
          - --device
          - {{ ternary "cuda" "cpu" (gt ($v.quantize.gpus | int) 0) }}
          {{- range $v.quantize.args }}
          - {{ . | quote }}
          {{- end }}
        env:
          - {name: HOME, value: /tmp}
          - {name: HF_HOME, value: /models}
          - {name: HF_HUB_OFFLINE, value: "1"}
          - {name: TRTSPEC_PROGRESS, value: "1"}
        securityContext: {{- toYaml $v.securityContext | nindent 10 }}
        {{- $resources := deepCopy $v.quantize.resources }}
        {{- if gt ($v.quantize.gpus | int) 0 }}
        {{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" ($v.quantize.gpus | toString)) (get $resources "limits" | default (dict))) }}
        {{- end }}
        resources: {{- toYaml $resources | nindent 10 }}
        volumeMounts:
          - {name: models, mountPath: /models}
          - {name: tmp, mountPath: /tmp}
    volumes:
      {{- include "trtspec.modelsVolume" . | nindent 6 }}
      - name: tmp
        emptyDir: {}
{{- end -}}
