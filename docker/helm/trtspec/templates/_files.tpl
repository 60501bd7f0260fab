{{/* The files of /etc/trtspec, by name. */}}
{{- define "trtspec.files" -}}
{{- $files := dict "drain.py" (.Files.Get "scripts/drain.py") -}}
{{- $parts := include "trtspec.parts" . | fromJson -}}
{{- range $part, $spec := $parts -}}
{{- $_ := set $files (printf "%s.yml" (ternary "engine" $part (eq $part "server"))) $spec.engineConfig -}}
{{- if gt ($spec.nodes | int) 1 -}}
{{- range $name := list "leader.sh" "worker.sh" -}}
{{- $_ := set $files $name ($.Files.Get (printf "scripts/%s" $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey $parts "context" -}}
{{- $_ := set $files "front.yml" (include "trtspec.front" .) -}}
{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/* What the front reads: as `trtspec build-config --role front` writes it, with the names of this release's pods. */}}
{{- define "trtspec.front" -}}
hostname: 0.0.0.0
port: 8000
backend: pytorch
{{- range $part, $spec := include "trtspec.parts" . | fromJson }}
{{- $name := include "trtspec.partName" (dict "root" $ "part" $part "spec" $spec) }}
{{ $part }}_servers:
  num_instances: {{ $spec.replicas }}
  urls:
    {{- range until ($spec.replicas | int) }}
    - {{ $name }}-{{ . }}.{{ $name }}:8000
    {{- end }}
{{- end }}
{{ end -}}
