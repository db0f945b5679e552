{{- define "npugrad.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "npugrad.selector" -}}
app.kubernetes.io/name: npugrad
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "npugrad.labels" -}}
{{ include "npugrad.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "npugrad.image" -}}
{{- $kind := ternary "cpu" (printf "%s-%s" .Values.image.chip .Values.image.os) (eq .Values.devices.kind "cpu") -}}
{{- printf "%s:%s" .Values.image.repository (default (printf "%s-%s" .Chart.AppVersion $kind) .Values.image.tag) -}}
{{- end -}}

{{- define "npugrad.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "npugrad.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "npugrad.tlsSecret" -}}
{{- default (printf "%s-tls" (include "npugrad.name" .)) .Values.tls.secretName -}}
{{- end -}}

{{- /* Whether there is a file of tenants. */ -}}
{{- define "npugrad.hasTenants" -}}
{{- with .Values.tenants -}}{{- if or .file .configMapName .secretName -}}true{{- end -}}{{- end -}}
{{- end -}}

{{- /* Every device of a pod: npu:0,npu:1. */ -}}
{{- define "npugrad.devices" -}}
{{- $names := list -}}
{{- range $i := until (int .Values.devices.count) -}}
{{- $mode := ternary "?deterministic=1" "" (and $.Values.devices.deterministic (eq $.Values.devices.kind "npu")) -}}
{{- $names = append $names (printf "%s:%d%s" $.Values.devices.kind $i $mode) -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{- define "npugrad.memorySumGiB" -}}
{{- add .Values.memory.inputArenaGiB (mul .Values.devices.count .Values.memory.outputArenaGiB) .Values.memory.roomGiB -}}
{{- end -}}

{{- define "npugrad.memoryLimitGiB" -}}
{{- default (include "npugrad.memorySumGiB" .) (int .Values.memory.limitGiB | toString | trimPrefix "0") -}}
{{- end -}}

{{- /* Kubernetes kills the pod after so many seconds: all that the server may take to end. */ -}}
{{- define "npugrad.graceSeconds" -}}
{{- add .Values.timing.drainDelay .Values.timing.drainTimeout .Values.timing.hangGrace .Values.timing.endingSpare -}}
{{- end -}}

{{- /* A server without a device gives up after three times its start limit and 5 seconds. */ -}}
{{- define "npugrad.startSeconds" -}}
{{- add (mul 3 .Values.timing.workerStartTimeout) 5 -}}
{{- end -}}

{{- /* The longest call, with its transfers, to whole minutes. */ -}}
{{- define "npugrad.connectionGraceSeconds" -}}
{{- $longest := add .Values.timing.runLimit (mul 2 .Values.timing.idleTimeout) .Values.timing.hangGrace -}}
{{- mul 60 (div (add $longest 59) 60) -}}
{{- end -}}

{{- /* Values that contradict each other. */ -}}
{{- define "npugrad.check" -}}
{{- $v := .Values -}}
{{- $sum := include "npugrad.memorySumGiB" . | int -}}
{{- if and $v.memory.limitGiB (lt (int $v.memory.limitGiB) $sum) -}}
{{- fail (printf "memory.limitGiB: found %d; expected at least %d, which is inputArenaGiB + devices.count x outputArenaGiB + roomGiB" (int $v.memory.limitGiB) $sum) -}}
{{- end -}}
{{- if and $v.tls.enabled $v.insecure -}}
{{- fail "insecure: found true with tls.enabled: true; expected one of them" -}}
{{- end -}}
{{- if not (or $v.tls.enabled $v.insecure) -}}
{{- fail "tls.enabled: found false; expected true, or insecure: true to serve plaintext" -}}
{{- end -}}
{{- if and $v.tls.mutual (not (and $v.tls.enabled $v.tls.clientCaSecretName)) -}}
{{- fail "tls.mutual: found true without tls.enabled or tls.clientCaSecretName; expected both" -}}
{{- end -}}
{{- if and $v.tls.certificate.create (not $v.tls.enabled) -}}
{{- fail "tls.certificate.create: found true with tls.enabled: false; expected TLS to be on" -}}
{{- end -}}
{{- if and $v.tls.certificate.create (not $v.tls.certificate.issuer.name) -}}
{{- fail "tls.certificate.issuer.name: found none; expected the name of a cert-manager issuer" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "npugrad.name" .)) -}}
{{- fail (printf "release: found the name %q; expected lower-case letters, digits and hyphens, a letter first, or set nameOverride" .Release.Name) -}}
{{- end -}}
{{- if and $v.loadTest.enabled (not $v.loadTest.image) -}}
{{- fail "loadTest.image: found none; expected an image built with EXTRAS=server,bench" -}}
{{- end -}}
{{- if and $v.grpcRoute.enabled (not $v.grpcRoute.parentRefs) -}}
{{- fail "grpcRoute.parentRefs: found none; expected the Gateway that the route belongs to" -}}
{{- end -}}
{{- if and $v.volcano.enabled $v.dra.enabled -}}
{{- fail "volcano.enabled: found true with dra.enabled: true; expected one of them, as each assigns the cards" -}}
{{- end -}}
{{- if and $v.loadTest.enabled $v.tls.mutual (not $v.loadTest.clientSecretName) -}}
{{- fail "loadTest.clientSecretName: found none with tls.mutual; expected a Secret with the Job's own certificate" -}}
{{- end -}}
{{- $tenants := without (list $v.tenants.file $v.tenants.configMapName $v.tenants.secretName) "" -}}
{{- if gt (len $tenants) 1 -}}
{{- fail "tenants: found more than one of file, configMapName and secretName; expected one of them" -}}
{{- end -}}
{{- if and $tenants (not $v.tls.mutual) -}}
{{- fail "tls.mutual: found false with tenants; expected true, as a tenant is told by its certificate" -}}
{{- end -}}
{{- if and (eq $v.devices.kind "npu") (not $v.dra.enabled) (not $v.devices.resource) -}}
{{- fail "devices.resource: found none; expected the name of the card among the node's resources, or dra.enabled: true" -}}
{{- end -}}
{{- if and $v.dra.enabled (or $v.devices.resource (eq $v.devices.kind "cpu")) -}}
{{- fail (printf "dra.enabled: found true with devices.kind: %s and devices.resource: %q; expected npu and no resource, as the claim asks for the cards" $v.devices.kind $v.devices.resource) -}}
{{- end -}}
{{- if and (eq $v.devices.kind "cpu") (or $v.devices.resource $v.volcano.enabled) -}}
{{- fail "devices.kind: found cpu with a card resource or Volcano; expected neither" -}}
{{- end -}}
{{- if and (eq $v.devices.kind "cpu") (eq $v.product "auto") -}}
{{- fail "product: found auto with devices.kind: cpu; expected atlas-training, atlas-a2 or atlas-a3, whose limits the calls are held to" -}}
{{- end -}}
{{- if le (int $v.timing.livenessDownLimit) (include "npugrad.startSeconds" . | int) -}}
{{- fail (printf "timing.livenessDownLimit: found %d; expected more than %s, the seconds that a start may take" (int $v.timing.livenessDownLimit) (include "npugrad.startSeconds" .)) -}}
{{- end -}}
{{- if eq (int $v.service.grpcPort) (int $v.service.metricsPort) -}}
{{- fail (printf "service.metricsPort: found %d, which is grpcPort; expected another port" (int $v.service.metricsPort)) -}}
{{- end -}}
{{- if lt (int $v.autoscaling.maxReplicas) (int $v.autoscaling.minReplicas) -}}
{{- fail (printf "autoscaling.maxReplicas: found %d; expected at least minReplicas, %d" (int $v.autoscaling.maxReplicas) (int $v.autoscaling.minReplicas)) -}}
{{- end -}}
{{- $scratch := addf $v.resources.homeGiB $v.resources.tmpGiB -}}
{{- if gt $scratch (float64 $v.resources.ephemeralStorageGiB) -}}
{{- fail (printf "resources.ephemeralStorageGiB: found %v; expected at least homeGiB + tmpGiB, %v" $v.resources.ephemeralStorageGiB $scratch) -}}
{{- end -}}
{{- $own := list "--listen" "--insecure" "--metrics-listen" "--devices" "--product" "--tls-certificate" "--tls-key" "--tls-client-ca" "--tenants" "--worker-start-timeout-s" "--liveness-down-limit-s" "--drain-delay-s" "--drain-timeout-s" "--hang-grace-s" "--run-limit-s" "--upload-idle-timeout-s" "--reply-idle-timeout-s" "--max-connection-age-s" "--max-connection-age-grace-s" "--input-arena-bytes" "--output-arena-bytes" -}}
{{- range $v.extraArgs -}}
{{- $flag := regexFind "^[^=]+" . -}}
{{- if has $flag $own -}}
{{- fail (printf "extraArgs: found %s; expected the value of the chart that sets it" $flag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "npugrad.mebibytes" -}}
{{- printf "%dMi" (mulf . 1024 | int) -}}
{{- end -}}

{{- define "npugrad.quantities" -}}
{{- if and (eq .Values.devices.kind "npu") (not .Values.dra.enabled) -}}
{{ .Values.devices.resource }}: {{ .Values.devices.count }}
{{ end -}}
cpu: {{ .Values.resources.cpu | quote }}
memory: {{ include "npugrad.memoryLimitGiB" . }}Gi
ephemeral-storage: {{ include "npugrad.mebibytes" .Values.resources.ephemeralStorageGiB }}
{{- end -}}
