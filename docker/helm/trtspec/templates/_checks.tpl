{{/* What the schema cannot say: values that contradict each other. Every message names the way out. */}}
{{- define "trtspec.checks" -}}
{{- $v := .Values -}}
{{- $parts := include "trtspec.parts" . | fromJson -}}
{{- if and $v.engineConfig (hasKey $parts "context") -}}
{{- fail "engineConfig and disaggregated are both set: one release is one server or a disaggregated deployment" -}}
{{- end -}}
{{- $pods := 0 -}}
{{- range $part, $spec := $parts -}}
{{- include "trtspec.checkPart" (dict "root" $ "part" $part "spec" $spec) -}}
{{- $pods = add $pods (mul $spec.nodes $spec.replicas) -}}
{{- if and (gt ($spec.nodes | int) 1) (not $v.ssh.existingSecret) -}}
{{- fail "several nodes need ssh.existingSecret: a Secret with id_ed25519 and id_ed25519.pub (ssh-keygen -t ed25519)" -}}
{{- end -}}
{{- end -}}
{{- range $name := list $v.model.target ($v.model.head | default "") $v.quantize.source -}}
{{- if and (hasPrefix "/" $name) (not (hasPrefix "/models/" $name)) -}}
{{- fail (printf "%s is not in the pod: the cache is mounted at /models" $name) -}}
{{- end -}}
{{- end -}}
{{- range $word := $v.server.args -}}
{{- if regexMatch "^--(host|port|config|extra_llm_api_options|launcher|launcher-args|nodes|gpus-per-node|role|disaggregated|backend|json|dry-run)(=|$)" $word -}}
{{- fail (printf "server.args has %s, which the chart decides" $word) -}}
{{- end -}}
{{- end -}}
{{- range $item := $v.server.env -}}
{{- if eq $item.name "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS" -}}
{{- fail "server.env has TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS, which accepts drafts unseen: the text is corrupt" -}}
{{- end -}}
{{- end -}}
{{- range $label := keys $v.podLabels | sortAlpha -}}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "helm.sh/" $label) -}}
{{- fail (printf "podLabels has %s, which the chart sets" $label) -}}
{{- end -}}
{{- end -}}
{{- include "trtspec.checkCache" (dict "root" . "pods" $pods) -}}
{{- include "trtspec.checkQuantize" . -}}
{{- if and $v.autoscaling.enabled (not $v.autoscaling.metric) -}}
{{- fail "autoscaling needs autoscaling.metric: the name under which your metrics adapter serves the queued requests of a pod" -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (hasKey $parts "context") -}}
{{- fail "autoscaling is not for a disaggregated deployment: the front knows a fixed number of servers" -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (gt ($v.autoscaling.minReplicas | int) ($v.autoscaling.maxReplicas | int)) -}}
{{- fail "autoscaling.minReplicas is larger than autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}{{- fail "ingress.enabled needs ingress.host" -}}{{- end -}}
{{- if ne (empty $v.rdma.resource) (eq ($v.rdma.count | int) 0) -}}
{{- fail "rdma needs both: the resource of your device plugin, such as rdma/ib, and a count" -}}
{{- end -}}
{{- if and (eq $v.update.strategy "RollingUpdate") (eq (add $v.update.maxSurge $v.update.maxUnavailable | int) 0) -}}
{{- fail "update.maxSurge and update.maxUnavailable cannot both be 0" -}}
{{- end -}}
{{- end -}}

{{/* One engine file against the release. Arguments: root, part, spec. */}}
{{- define "trtspec.checkPart" -}}
{{- $v := .root.Values -}}
{{- $again := "write the values again with `trtspec build-config --format helm-values`" -}}
{{- $key := ternary "engineConfig" (printf "disaggregated.%s.engineConfig" .part) (eq .part "server") -}}
{{- $first := index (splitList "\n" .spec.engineConfig) 0 -}}
{{- $words := splitList " " $first -}}
{{- $config := fromYaml .spec.engineConfig -}}
{{- if hasKey $config "Error" -}}{{- fail (printf "%s is not YAML (%s): %s" $key $config.Error $again) -}}{{- end -}}
{{- include "trtspec.checkKeys" (dict "known" (.root.Files.Get "engine-keys.json" | fromJson) "where" $key "above" "" "values" $config) -}}
{{- if not (regexMatch "^# TensorRT-LLM [^ ]+: trtspec build-config " $first) -}}
{{- fail (printf "%s does not begin with the line that says for which version and model it was written: %s" $key $again) -}}
{{- end -}}
{{- $version := regexReplaceAll "^# TensorRT-LLM ([^ ]+): .*$" $first "${1}" -}}
{{- if not (or (eq $v.image.tag $version) (hasPrefix (printf "%s-" $version) $v.image.tag)) -}}
{{- fail (printf "%s was written for TensorRT-LLM %s and image.tag is %s: %s" $key $version $v.image.tag $again) -}}
{{- end -}}
{{- if not (contains (printf " build-config %s " $v.model.target) (printf "%s " $first)) -}}
{{- fail (printf "%s was not written for model.target %s: %s" $key $v.model.target $again) -}}
{{- end -}}
{{- $speculative := dig "speculative_config" (dict) $config | default (dict) -}}
{{- $head := coalesce (get $speculative "speculative_model_dir") (get $speculative "speculative_model") | default "" -}}
{{- if ne $head (include "trtspec.path" ($v.model.head | default "")) -}}
{{- fail (printf "model.head is %q and %s names %q: %s" ($v.model.head | default "") $key $head $again) -}}
{{- end -}}
{{- $role := include "trtspec.option" (dict "args" $words "names" (list "--role") "default" "server") -}}
{{- if ne $role .part -}}{{- fail (printf "%s was written for a %s: %s" $key $role $again) -}}{{- end -}}
{{- $args := concat $words $v.server.args -}}
{{- $tp := include "trtspec.option" (dict "args" $args "names" (list "--tp-size" "--tp_size") "default" "4") | int -}}
{{- $pp := include "trtspec.option" (dict "args" $args "names" (list "--pp_size") "default" (get $config "pipeline_parallel_size" | default 1 | toString)) | int -}}
{{- $cp := include "trtspec.option" (dict "args" $args "names" (list "--cp_size") "default" (get $config "context_parallel_size" | default 1 | toString)) | int -}}
{{- $gpus := mul .spec.nodes .spec.gpusPerNode | int -}}
{{- if ne (mul $tp $pp $cp | int) $gpus -}}
{{- fail (printf "%s uses %d GPUs (tp %d x pp %d x cp %d) and nodes x gpusPerNode is %d" $key (mul $tp $pp $cp | int) $tp $pp $cp $gpus) -}}
{{- end -}}
{{- if and (or $v.metrics.serviceMonitor.enabled $v.metrics.podMonitor.enabled) (not (eq (toString (get $config "return_perf_metrics")) "true")) -}}
{{- fail "metrics need the engine's Prometheus endpoint: build-config --set return_perf_metrics=true" -}}
{{- end -}}
{{- end -}}

{{/* A key that no release of TensorRT-LLM has would stop the engine after the download. `known`: whether the keys below a
     key are known too. Arguments: known, where, above, values. */}}
{{- define "trtspec.checkKeys" -}}
{{- range $name, $value := .values -}}
{{- $path := printf "%s%s" $.above $name -}}
{{- if not (hasKey $.known $path) -}}
{{- fail (printf "%s has the key %s, which no known release of TensorRT-LLM has: run `trtspec lint` on the values" $.where $path) -}}
{{- end -}}
{{- if and (get $.known $path) (kindIs "map" $value) -}}
{{- include "trtspec.checkKeys" (dict "known" $.known "where" $.where "above" (printf "%s." $path) "values" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Arguments: root, and pods: how many read the cache at once. */}}
{{- define "trtspec.checkCache" -}}
{{- $v := .root.Values -}}
{{- $type := $v.cache.type -}}
{{- if and (eq $type "claim") (eq $v.cache.accessMode "ReadWriteOnce") (gt (.pods | int) 1) -}}
{{- fail (printf "%d pods read one claim that one node mounts: set cache.accessMode to ReadWriteMany" (.pods | int)) -}}
{{- end -}}
{{- if and (eq $type "claim") (not $v.cache.existingClaim) -}}
{{- $need := add $v.model.sizeGiB (ternary ($v.quantize.sourceGiB | int) 0 $v.quantize.enabled) -}}
{{- if lt (include "trtspec.gib" $v.cache.size | float64) ($need | float64) -}}
{{- fail (printf "cache.size %s does not hold the %d GiB of the checkpoints" $v.cache.size $need) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $type "nodeLocal") (not (hasPrefix "/" $v.cache.nodeLocal.path)) -}}
{{- fail "cache.type nodeLocal needs cache.nodeLocal.path: a directory that every selected node has" -}}
{{- end -}}
{{- if and (eq $type "objectStore") (not $v.cache.objectStore.driver) -}}
{{- fail "cache.type objectStore needs cache.objectStore.driver: the CSI driver that mounts your bucket" -}}
{{- end -}}
{{- if and (eq $type "objectStore") (or $v.download.enabled $v.quantize.enabled (not (hasPrefix "/models/" $v.model.target))) -}}
{{- fail "cache.type objectStore reads plain directories: set download.enabled to false and model.target to a directory below /models" -}}
{{- end -}}
{{- if and (eq $v.cache.accessMode "ReadOnlyMany") (or $v.download.enabled $v.quantize.enabled) -}}
{{- fail "a ReadOnlyMany claim cannot be filled: set download.enabled and quantize.enabled to false" -}}
{{- end -}}
{{- if and $v.download.enabled (not $v.quantize.enabled) (hasPrefix "/" $v.model.target) -}}
{{- fail (printf "%s cannot be downloaded: set download.enabled to false, or quantize into it" $v.model.target) -}}
{{- end -}}
{{- end -}}

{{- define "trtspec.checkQuantize" -}}
{{- $v := .Values -}}
{{- if $v.quantize.enabled -}}
{{- if not (and $v.quantize.source $v.quantize.image.repository (or $v.quantize.image.tag $v.quantize.image.digest)) -}}
{{- fail "quantize.enabled needs quantize.source and quantize.image (built from docker/quantize.Dockerfile)" -}}
{{- end -}}
{{- if not (hasPrefix "/models/" $v.model.target) -}}
{{- fail (printf "quantize writes model.target, which must be a directory below /models, not %s" $v.model.target) -}}
{{- end -}}
{{- if ne $v.cache.type "claim" -}}
{{- fail "quantize needs cache.type claim: quantize once into a claim, then copy the result" -}}
{{- end -}}
{{- end -}}
{{- end -}}
