{{/* What the schema cannot say: values that contradict each other. Every message names the way out. */}}
{{- define "trtspec.checks" -}}
{{- $v := .Values -}}
{{- $args := $v.server.args -}}
{{- $again := "write the values again with `trtspec build-config --format helm-values`" -}}
{{- $first := index (splitList "\n" $v.engineConfig) 0 -}}
{{- $config := fromYaml $v.engineConfig -}}
{{- if hasKey $config "Error" -}}{{- fail (printf "engineConfig is not YAML (%s): %s" $config.Error $again) -}}{{- end -}}
{{- if not (regexMatch "^# TensorRT-LLM [^ ]+: trtspec build-config " $first) -}}
{{- fail (printf "engineConfig does not begin with the line that says for which version and model it was written: %s" $again) -}}
{{- end -}}
{{- $version := regexReplaceAll "^# TensorRT-LLM ([^ ]+): .*$" $first "${1}" -}}
{{- if not (or (eq $v.image.tag $version) (hasPrefix (printf "%s-" $version) $v.image.tag)) -}}
{{- fail (printf "engineConfig was written for TensorRT-LLM %s and image.tag is %s: %s" $version $v.image.tag $again) -}}
{{- end -}}
{{- if not (contains (printf " build-config %s " $v.model.target) (printf "%s " $first)) -}}
{{- fail (printf "engineConfig was not written for model.target %s: %s" $v.model.target $again) -}}
{{- end -}}
{{- $speculative := dig "speculative_config" (dict) $config | default (dict) -}}
{{- $head := coalesce (get $speculative "speculative_model_dir") (get $speculative "speculative_model") | default "" -}}
{{- if ne $head ($v.model.head | default "") -}}
{{- fail (printf "model.head is %q and engineConfig names %q: %s" ($v.model.head | default "") $head $again) -}}
{{- end -}}
{{- range $name := list $v.model.target ($v.model.head | default "") -}}
{{- if and (hasPrefix "/" $name) (not (hasPrefix "/models/" $name)) -}}
{{- fail (printf "%s is not in the pod: the claim is mounted at /models" $name) -}}
{{- end -}}
{{- end -}}
{{- range $word := $args -}}
{{- if regexMatch "^--(extra_llm_api_options|config)(=|$)" $word -}}
{{- fail (printf "server.args has %s: the chart passes engineConfig itself" $word) -}}
{{- end -}}
{{- end -}}
{{- $host := include "trtspec.option" (dict "args" $args "names" (list "--host") "default" "localhost") -}}
{{- if ne $host "0.0.0.0" -}}{{- fail (printf "--host in server.args is %s: the Service reaches only 0.0.0.0" $host) -}}{{- end -}}
{{- $tp := include "trtspec.option" (dict "args" $args "names" (list "--tp_size" "--tensor_parallel_size") "default" "1") | int -}}
{{- $pp := include "trtspec.option" (dict "args" $args "names" (list "--pp_size" "--pipeline_parallel_size") "default" "1") | int -}}
{{- $cp := include "trtspec.option" (dict "args" $args "names" (list "--cp_size" "--context_parallel_size") "default" "1") | int -}}
{{- $world := mul $tp $pp $cp | int -}}
{{- $gpus := mul $v.nodes $v.gpusPerNode | int -}}
{{- if ne $world $gpus -}}
{{- fail (printf "server.args use %d GPUs (tp %d x pp %d x cp %d) and nodes x gpusPerNode is %d" $world $tp $pp $cp $gpus) -}}
{{- end -}}
{{- if and (gt ($v.nodes | int) 1) (not $v.ssh.existingSecret) -}}
{{- fail "several nodes need ssh.existingSecret: a Secret with id_ed25519 and id_ed25519.pub (ssh-keygen -t ed25519)" -}}
{{- end -}}
{{- if and (gt (mul $v.nodes $v.replicas | int) 1) (not $v.cache.existingClaim) (ne $v.cache.accessMode "ReadWriteMany") -}}
{{- fail "several pods read one claim: set cache.accessMode to ReadWriteMany, or cache.existingClaim" -}}
{{- end -}}
{{- if and (hasSuffix "Gi" $v.cache.size) (lt (trimSuffix "Gi" $v.cache.size | int) ($v.model.sizeGiB | int)) -}}
{{- fail (printf "cache.size %s does not hold model.sizeGiB %d" $v.cache.size ($v.model.sizeGiB | int)) -}}
{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled (not (eq (toString (get $config "return_perf_metrics")) "true")) -}}
{{- fail "metrics.serviceMonitor needs the engine's Prometheus endpoint: build-config --set return_perf_metrics=true" -}}
{{- end -}}
{{- if and $v.quantize.enabled (not (and $v.quantize.source $v.quantize.image)) -}}
{{- fail "quantize.enabled needs quantize.source and quantize.image (built from docker/quantize.Dockerfile)" -}}
{{- end -}}
{{- if and $v.quantize.enabled (not (hasPrefix "/models/" $v.model.target)) -}}
{{- fail (printf "quantize writes model.target, which must be a directory below /models, not %s" $v.model.target) -}}
{{- end -}}
{{- if and $v.download.enabled (not $v.quantize.enabled) (hasPrefix "/" $v.model.target) -}}
{{- fail (printf "%s cannot be downloaded: set download.enabled to false, or quantize into it" $v.model.target) -}}
{{- end -}}
{{- range $item := $v.server.env -}}
{{- if eq $item.name "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS" -}}
{{- fail "server.env has TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS, which accepts drafts unseen: the text is corrupt" -}}
{{- end -}}
{{- end -}}
{{- end -}}
