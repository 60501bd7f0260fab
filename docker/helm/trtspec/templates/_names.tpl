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

{{/* Argument: an image as the values have it. */}}
{{- define "trtspec.image" -}}
{{- if .digest }}{{ printf "%s@%s" .repository .digest | quote }}{{ else }}{{ printf "%s:%s" .repository .tag | quote }}{{ end -}}
{{- end -}}

{{- define "trtspec.claim" -}}
{{ default (printf "%s-models" (include "trtspec.fullname" .)) .Values.cache.existingClaim }}
{{- end -}}

{{- define "trtspec.serviceAccount" -}}
{{ default (ternary (include "trtspec.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end -}}

{{/* The engines of this release by role, as JSON: one "server", or "context" and "generation". */}}
{{- define "trtspec.parts" -}}
{{- $v := .Values -}}
{{- if or $v.disaggregated.context.engineConfig $v.disaggregated.generation.engineConfig -}}
{{- $v.disaggregated | toJson -}}
{{- else -}}
{{- dict "server" (pick $v "replicas" "nodes" "gpusPerNode" "engineConfig") | toJson -}}
{{- end -}}
{{- end -}}

{{/* Object name of a part. The size of a LeaderWorkerSet cannot be changed, so it is in the name. Arguments: root, part,
     spec. */}}
{{- define "trtspec.partName" -}}
{{- $name := include "trtspec.fullname" .root -}}
{{- if ne .part "server" -}}{{- $name = printf "%s-%s" $name .part -}}{{- end -}}
{{- if gt (.spec.nodes | int) 1 -}}{{- $name = printf "%s-%dn" $name (.spec.nodes | int) -}}{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Files that say that a checkpoint is whole. A Job writes its own when it is done; the next step looks for it. */}}
{{- define "trtspec.downloads" -}}
{{- $first := ternary .Values.quantize.source .Values.model.target .Values.quantize.enabled -}}
{{- compact (list $first (.Values.model.head | default "")) | join " " -}}
{{- end -}}
{{/* How the engine's file names a head: its snapshot's directory where it has a commit, which the engine takes no other
     way. Argument: the head as the values have it. */}}
{{- define "trtspec.path" -}}
{{- $parts := splitList "@" . -}}
{{- if eq (len $parts) 1 }}{{ . }}{{ else }}/models/hub/models--{{ replace "/" "--" (first $parts) }}/snapshots/{{ last $parts }}{{ end -}}
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

{{/* The value of an option in a list of words, or the default. */}}
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

{{/* A quantity in GiB. */}}
{{- define "trtspec.gib" -}}
{{- $units := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $unit := regexFind "[a-zA-Z]*$" . -}}
{{- divf (mulf (trimSuffix $unit . | float64) (get $units $unit)) 1073741824.0 -}}
{{- end -}}
