{{/* Where pods run. The volume of the models decides most of it: a claim that one node mounts keeps its pods together. */}}

{{- define "trtspec.claimLabel" -}}
{{- if eq .Values.cache.type "claim" -}}
trtspec/claim: {{ include "trtspec.claim" . | trim | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "trtspec.modelsVolume" -}}
{{- $cache := .Values.cache -}}
- name: models
  {{- if eq $cache.type "nodeLocal" }}
  hostPath: {path: {{ $cache.nodeLocal.path | quote }}, type: Directory}
  {{- else if eq $cache.type "objectStore" }}
  csi:
    driver: {{ $cache.objectStore.driver }}
    readOnly: true
    {{- with $cache.objectStore.attributes }}
    volumeAttributes: {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ include "trtspec.claim" . }}}
  {{- end }}
{{- end -}}

{{/* The affinity of the values, and of a ReadWriteOnce claim: the first pod chooses the node, others follow it. */}}
{{- define "trtspec.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- if and (eq .Values.cache.type "claim") (eq .Values.cache.accessMode "ReadWriteOnce") -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "trtspec.claimLabel" . | fromYaml)) -}}
{{- $pod := get $affinity "podAffinity" | default (dict) -}}
{{- $key := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $_ := set $pod $key (append (get $pod $key | default list) $term) -}}
{{- $_ := set $affinity "podAffinity" $pod -}}
{{- end -}}
{{- with $affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "trtspec.nodeSelector" -}}
{{- $selector := deepCopy .Values.nodeSelector -}}
{{- with .Values.gpuProduct -}}
{{- $_ := set $selector "nvidia.com/gpu.product" (index $.Values.gpuProductLabels .) -}}
{{- end -}}
{{- toYaml $selector -}}
{{- end -}}

{{/* Of a server. Arguments: root, part. */}}
{{- define "trtspec.placement" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- with include "trtspec.nodeSelector" $root | fromYaml }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "trtspec.affinity" $root }}
{{- with $v.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $own := dict "labelSelector" (dict "matchLabels" (merge (dict "app.kubernetes.io/component" $.part) (include "trtspec.selector" $root | fromYaml))) }}
  - {{- mergeOverwrite $own . | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with get $v $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of a Job: as the servers, unless jobs says otherwise. */}}
{{- define "trtspec.jobPlacement" -}}
{{- $v := .Values -}}
{{- $selector := ternary (include "trtspec.nodeSelector" . | fromYaml) $v.jobs.nodeSelector (kindIs "invalid" $v.jobs.nodeSelector) -}}
{{- $tolerations := ternary $v.tolerations $v.jobs.tolerations (kindIs "invalid" $v.jobs.tolerations) -}}
{{- with $selector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "trtspec.affinity" . }}
{{- range $key := list "priorityClassName" "schedulerName" }}
{{- with get $v $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- end -}}
