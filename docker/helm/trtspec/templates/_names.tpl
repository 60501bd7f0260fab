{{- define "trtspec.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $whole .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "trtspec.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trtspec.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{ include "trtspec.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "trtspec.image" -}}
{{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
{{- end -}}

{{- define "trtspec.claim" -}}
{{ default (printf "%s-models" (include "trtspec.fullname" .)) .Values.cache.existingClaim }}
{{- end -}}

{{- define "trtspec.serviceAccount" -}}
{{ default (ternary (include "trtspec.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end -}}

{{/* Files that say that a checkpoint is whole. A Job writes its own when it is done; the next step waits for it. */}}
{{- define "trtspec.downloads" -}}
{{- $first := ternary .Values.quantize.source .Values.model.target .Values.quantize.enabled -}}
{{- compact (list $first (.Values.model.head | default "")) | join " " -}}
{{- end -}}
{{- define "trtspec.downloaded" -}}
/models/.trtspec/downloaded-{{ include "trtspec.downloads" . | sha256sum | trunc 12 }}
{{- end -}}
{{- define "trtspec.quantized" -}}
/models/.trtspec/quantized-{{ printf "%s %s %s" .Values.quantize.source .Values.model.target (join " " .Values.quantize.args) | sha256sum | trunc 12 }}
{{- end -}}
{{- define "trtspec.complete" -}}
{{- if .Values.quantize.enabled }}{{ include "trtspec.quantized" . }}{{ else if .Values.download.enabled }}{{ include "trtspec.downloaded" . }}{{ end -}}
{{- end -}}

{{/* The value of an option in server.args, or the default. */}}
{{- define "trtspec.option" -}}
{{- $found := .default -}}
{{- $names := .names -}}
{{- $args := .args -}}
{{- range $index, $word := $args -}}
{{- if and (has $word $names) (lt (add1 $index | int) (len $args)) -}}{{- $found = index $args (add1 $index | int) -}}{{- end -}}
{{- range $name := $names -}}
{{- if hasPrefix (printf "%s=" $name) $word -}}{{- $found = trimPrefix (printf "%s=" $name) $word -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}
{{- define "trtspec.port" -}}
{{ include "trtspec.option" (dict "args" .Values.server.args "names" (list "--port") "default" "8000") }}
{{- end -}}
