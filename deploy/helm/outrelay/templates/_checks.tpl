{{- /*
outrelay.check rejects values that contradict each other, or with which no pod can run, and lists all of them. values.schema.json
has checked names and types before.
*/ -}}
{{- define "outrelay.check" -}}
{{- $values := .Values -}}
{{- $config := .Values.config -}}
{{- $http := $config.http | default dict -}}
{{- $admin := $http.admin | default dict -}}
{{- $hasAdmin := not (kindIs "invalid" $http.admin) -}}
{{- $problems := list -}}

{{- $malformed := include "outrelay.formProblems" . | trim -}}
{{- with $malformed -}}
{{- $problems = splitList "\n" . -}}
{{- end -}}

{{- /* The image. */ -}}
{{- if not .Values.image.repository -}}
{{- $problems = append $problems "image.repository is required: there is no released image yet; build it with the Dockerfile, push it to your registry, and set the repository (docs/operate/kubernetes.md)" -}}
{{- else if regexMatch "@|:[^/]*$" .Values.image.repository -}}
{{- $problems = append $problems (printf "image.repository: found %q; expected a name without tag and digest: set image.tag or image.digest" .Values.image.repository) -}}
{{- end -}}
{{- with .Values.image.repository -}}
{{- if not (regexMatch "^([a-zA-Z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*(@.*|:[^/]*)?$" .) -}}
{{- $problems = append $problems (printf "image.repository: found %q; expected a name such as registry.example.com/outrelay: lower case, and without https://" .) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.image.tag) (not .Values.image.digest) -}}
{{- $problems = append $problems "image.tag is required, or image.digest: set it to that of the pushed image" -}}
{{- end -}}

{{- /* The services have this name, also with an ending. */ -}}
{{- $fullname := include "outrelay.fullname" . -}}
{{- if not (regexMatch "^[a-z]" $fullname) -}}
{{- $problems = append $problems (printf "the name of the services, %s, does not begin with a letter; set fullnameOverride" $fullname) -}}
{{- end -}}
{{- if and .Values.admin.enabled (gt (len $fullname) 57) -}}
{{- $problems = append $problems (printf "the name of a service, %s-admin, is longer than 63 characters; set fullnameOverride" $fullname) -}}
{{- end -}}

{{- /* Keys that the schema does not require, because variables could set them elsewhere. */ -}}
{{- if not (dig "uri" "" ($config.mongodb | default dict)) -}}
{{- $problems = append $problems "config.mongodb.uri is required: put the connection string into a secret, and refer to it, such as ${file:/run/secrets/outrelay/outrelay/mongodb-uri}" -}}
{{- end -}}
{{- if not (dig "brokers" "" ($config.kafka | default dict)) -}}
{{- $problems = append $problems "config.kafka.brokers is required: set the bootstrap addresses, such as [kafka-bootstrap.kafka:9092]" -}}
{{- end -}}
{{- range list "node" "address" -}}
{{- if get $config . -}}
{{- $problems = append $problems (printf "config.%s: remove it; the chart sets it for each pod" .) -}}
{{- end -}}
{{- end -}}

{{- /* The listeners: ports, probes and services are made from them. */ -}}
{{- $listen := include "outrelay.listen" . -}}
{{- if eq $listen "off" -}}
{{- $problems = append $problems "config.http.listen is off: the probes of the pods need it; set it to 0.0.0.0:9464" -}}
{{- else -}}
{{- with include "outrelay.listenProblem" (dict "listen" $listen "who" "the probes and Prometheus") -}}
{{- $problems = append $problems (printf "config.http.listen: found %q; %s" $listen .) -}}
{{- end -}}
{{- end -}}
{{- $adminListen := include "outrelay.adminListen" . -}}
{{- $tasks := list "relay" "admin" -}}
{{- if kindIs "slice" $config.tasks -}}
{{- $tasks = $config.tasks -}}
{{- else if $config.tasks -}}
{{- $tasks = regexSplit " *, *" $config.tasks -1 -}}
{{- end -}}
{{- if not (or (has "relay" $tasks) (and (has "admin" $tasks) $hasAdmin) (contains "${" (toString $tasks))) -}}
{{- $problems = append $problems "config.tasks: the pods would do nothing; expected relay, or admin with config.http.admin" -}}
{{- end -}}
{{- if .Values.admin.enabled -}}
{{- if not $hasAdmin -}}
{{- $problems = append $problems "admin.enabled needs config.http.admin: without it, no page and no API is served; set its listen (0.0.0.0:9465) and a login, such as its token" -}}
{{- else if not (has "admin" $tasks) -}}
{{- $problems = append $problems "admin.enabled needs the task admin in config.tasks: without it, no page and no API is served" -}}
{{- else -}}
{{- with include "outrelay.listenProblem" (dict "listen" $adminListen "who" "the service of admin.enabled") -}}
{{- $problems = append $problems (printf "config.http.admin.listen: found %q; %s" $adminListen .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $hasAdmin -}}
{{- if and (eq (include "outrelay.portOf" $listen) (include "outrelay.portOf" $adminListen)) (ne $listen "off") -}}
{{- $problems = append $problems (printf "config.http.admin.listen: found %q; it needs another port than config.http.listen (%s)" $adminListen $listen) -}}
{{- end -}}
{{- $login := or $admin.token $admin.viewer_token $admin.proxy (dig "client_ca" "" ($admin.tls | default dict)) -}}
{{- if and (ne ($admin.anonymous | default "none") "none") (not (regexMatch "^(127\\..*|localhost|\\[::1\\]):|^off$" $adminListen)) -}}
{{- $problems = append $problems (printf "config.http.admin.anonymous: found %v; only an address that is local to the pod may be open to all clients; set token, tls.client_ca or proxy" $admin.anonymous) -}}
{{- end -}}
{{- if and $admin.token (eq (toString $admin.token) (toString $admin.viewer_token)) -}}
{{- $problems = append $problems "config.http.admin.viewer_token: it needs another key than token, because the token decides the role" -}}
{{- end -}}
{{- if and (not $login) (eq ($admin.anonymous | default "none") "none") -}}
{{- $problems = append $problems "config.http.admin: no client can log in; set token, such as ${file:/run/secrets/outrelay/outrelay-admin/token}, tls.client_ca or proxy" -}}
{{- end -}}
{{- end -}}

{{- /* Logins and certificates that lack a part. */ -}}
{{- $sasl := dig "sasl" dict ($config.kafka | default dict) | default dict -}}
{{- if $sasl -}}
{{- $needed := list -}}
{{- if not $sasl.mechanism -}}
{{- $needed = list "mechanism" -}}
{{- else if or (hasPrefix "scram" $sasl.mechanism) (eq $sasl.mechanism "plain") -}}
{{- $needed = list "username" "password" -}}
{{- else if eq $sasl.mechanism "oauthbearer" -}}
{{- $needed = list "token" -}}
{{- else if eq $sasl.mechanism "aws_msk_iam" -}}
{{- $needed = list "region" -}}
{{- end -}}
{{- range $needed -}}
{{- if not (get $sasl .) -}}
{{- $problems = append $problems (printf "config.kafka.sasl.%s is required%s" . (empty $sasl.mechanism | ternary "" (printf " for the mechanism %v" $sasl.mechanism))) -}}
{{- end -}}
{{- end -}}
{{- $sources := pick ($sasl.token | default dict) "file" "command" "oidc" | keys -}}
{{- if and $sasl.token (ne (len $sources) 1) -}}
{{- $problems = append $problems (printf "config.kafka.sasl.token: found %d sources; set exactly one of file, command and oidc" (len $sources)) -}}
{{- end -}}
{{- end -}}
{{- range $path, $section := dict "mongodb" $config.mongodb "kafka" $config.kafka "otel" $config.otel "http.admin" $admin -}}
{{- $tls := dig "tls" dict ($section | default dict) | default dict -}}
{{- if ne (empty $tls.cert) (empty $tls.key) -}}
{{- $problems = append $problems (printf "config.%s.tls.%s is required: a certificate and its private key belong together" $path (empty $tls.cert | ternary "cert" "key")) -}}
{{- end -}}
{{- end -}}

{{- /* Every text of the configuration: secrets, and the files and variables to which it refers. */ -}}
{{- $variables := list "POD_NAME" "POD_IP" "HOSTNAME" -}}
{{- range .Values.extraEnv -}}{{- $variables = append $variables .name -}}{{- end -}}
{{- range include "outrelay.texts" (dict "path" "config" "value" $config) | trim | splitList "\n" -}}
{{- $at := . | fromJson -}}
{{- $text := $at.text | default "" | replace "$${" "" -}}

{{- range regexFindAll "\\$\\{[^}]*\\}?" $text -1 -}}
{{- if not (regexMatch "^\\$\\{(env|file):[^}]+\\}$" .) -}}
{{- $problems = append $problems (printf "%s: found %q; expected ${env:NAME} or ${file:/path}" $at.path .) -}}
{{- end -}}
{{- end -}}

{{- $secret := regexMatch "^config\\.(kafka\\.sasl\\.password|kafka\\.sasl\\.token\\.oidc\\.client_secret|http\\.admin\\.(viewer_)?token|otel\\.token)$" ($at.path | default "") -}}
{{- $login := and (has $at.path (list "config.mongodb.uri" "config.otel.endpoint")) (regexMatch "://[^$/]*@" $text) -}}
{{- if and $text (or $login (and $secret (not (contains "${" $text)))) -}}
{{- $problems = append $problems (printf "%s: a password in a ConfigMap is readable for many; put it into a secret, list the secret in secrets, and refer to it as ${file:/run/secrets/outrelay/SECRET/KEY}" $at.path) -}}
{{- end -}}

{{- range regexFindAll "\\$\\{env:[^}]*\\}" $text -1 -}}
{{- $name := . | trimPrefix "${env:" | trimSuffix "}" -}}
{{- if not (or (has $name $variables) (regexMatch "^(AWS|AZURE|KUBERNETES)_" $name)) -}}
{{- $problems = append $problems (printf "%s: extraEnv has no variable %s" $at.path $name) -}}
{{- end -}}
{{- end -}}

{{- $files := list -}}
{{- range regexFindAll "\\$\\{file:[^}]*\\}" $text -1 -}}
{{- $files = append $files (. | trimPrefix "${file:" | trimSuffix "}") -}}
{{- end -}}
{{- if and (regexMatch "\\.(tls\\.(ca|cert|key|client_ca)|token\\.file)$" ($at.path | default "")) (not (contains "${" $text)) $text -}}
{{- $files = append $files $text -}}
{{- end -}}
{{- range $files -}}
{{- with include "outrelay.fileProblem" (dict "file" . "root" $) -}}
{{- $problems = append $problems (printf "%s: %s" $at.path .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Additions to the pod must not replace parts of the chart. */ -}}
{{- $names := list -}}
{{- range .Values.extraEnv -}}
{{- if has .name $names -}}
{{- $problems = append $problems (printf "extraEnv: found %s twice; the last one would count" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if and (hasKey . "value") (hasKey . "valueFrom") -}}
{{- $problems = append $problems (printf "extraEnv: %s has value and valueFrom; keep one of them" .name) -}}
{{- end -}}
{{- if hasPrefix "OUTRELAY_" .name -}}
{{- $problems = append $problems (printf "extraEnv: found %s; set its key in config, where the chart checks it; a secret belongs into a file: ${file:/run/secrets/outrelay/SECRET/KEY}" .name) -}}
{{- else if has .name (list "POD_NAME" "POD_IP") -}}
{{- $problems = append $problems (printf "extraEnv: found %s; remove it, the chart sets it" .name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $ignored := .Values.podLabels -}}
{{- if has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart") -}}
{{- $problems = append $problems (printf "podLabels: found %s; remove it, the chart sets it and selects the pods by it" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $ignored := .Values.podAnnotations -}}
{{- if has $name (list "checksum/config" "checksum/secrets") -}}
{{- $problems = append $problems (printf "podAnnotations: found %s; remove it, the chart sets it" $name) -}}
{{- end -}}
{{- end -}}
{{- $volumes := list -}}
{{- range .Values.extraVolumes -}}
{{- if regexMatch "^(config|secret-[0-9]+)$" (.name | default "") -}}
{{- $problems = append $problems (printf "extraVolumes: the chart has a volume %s; choose another name" .name) -}}
{{- end -}}
{{- if has .name $volumes -}}
{{- $problems = append $problems (printf "extraVolumes: found %s twice" .name) -}}
{{- end -}}
{{- if gt (len .) 2 -}}
{{- $problems = append $problems (printf "extraVolumes: %s has several sources (%s); keep one of them" .name (omit . "name" | keys | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $mounts := list -}}
{{- range .Values.extraVolumeMounts -}}
{{- if has .mountPath $mounts -}}
{{- $problems = append $problems (printf "extraVolumeMounts: found the path %s twice" .mountPath) -}}
{{- end -}}
{{- $mounts = append $mounts .mountPath -}}
{{- if eq (clean .mountPath) "/" -}}
{{- $problems = append $problems "extraVolumeMounts: found the path /, which hides the program; choose another path" -}}
{{- end -}}
{{- if not (has .name $volumes) -}}
{{- $problems = append $problems (printf "extraVolumeMounts: extraVolumes has no volume %s" .name) -}}
{{- end -}}
{{- if regexMatch "^(/etc/outrelay|/run/secrets/outrelay)(/|$)" (.mountPath | default "") -}}
{{- $problems = append $problems (printf "extraVolumeMounts: found the path %s, which the chart uses; choose another path, or list the secret in secrets" .mountPath) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) .Values.serviceAccount.annotations -}}
{{- $problems = append $problems "serviceAccount.annotations have no effect without serviceAccount.create: annotate the account where it is created" -}}
{{- end -}}

{{- /* Times and memory. A value that is listed already, or that is a reference, is compared with no other one. */ -}}
{{- $lease := $config.lease | default dict -}}
{{- $drain := include "outrelay.seconds" (kindIs "invalid" $lease.drain | ternary "10s" $lease.drain) | float64 -}}
{{- $ttl := include "outrelay.seconds" ($lease.ttl | default "5s") | float64 -}}
{{- if and (le (float64 .Values.terminationGracePeriodSeconds) (addf $drain $ttl)) (not (regexMatch `config\.lease\.(drain|ttl):` $malformed)) -}}
{{- $problems = append $problems (printf "terminationGracePeriodSeconds: found %d; Kubernetes would kill the process while it stops; expected more than config.lease.drain and config.lease.ttl together, %v s" (int .Values.terminationGracePeriodSeconds) (addf $drain $ttl)) -}}
{{- end -}}
{{- $limits := $config.limits | default dict -}}
{{- $renew := include "outrelay.seconds" ($lease.renew | default "1s") | float64 -}}
{{- if and (gt $ttl 0.0) (gt (mulf 3.0 $renew) $ttl) (not (regexMatch `config\.lease\.(renew|ttl):` $malformed)) -}}
{{- $problems = append $problems (printf "config.lease.renew: found %v; expected at most a third of config.lease.ttl, %v" ($lease.renew | default "1s") ($lease.ttl | default "5s")) -}}
{{- end -}}
{{- $retry := $config.retry | default dict -}}
{{- $cap := include "outrelay.seconds" ($retry.cap | default "5m") | float64 -}}
{{- $base := include "outrelay.seconds" ($retry.base | default "200ms") | float64 -}}
{{- if and (gt $cap 0.0) (lt $cap $base) (not (regexMatch `config\.retry\.(cap|base):` $malformed)) -}}
{{- $problems = append $problems (printf "config.retry.cap: found %v; expected at least config.retry.base, %v" ($retry.cap | default "5m") ($retry.base | default "200ms")) -}}
{{- end -}}
{{- $budget := include "outrelay.bytes" ($limits.memory | default "32MiB") | float64 -}}
{{- $limit := include "outrelay.bytes" (dig "limits" "memory" "" .Values.resources) | float64 -}}
{{- if and (kindIs "float64" $config.slots) (gt $budget 0.0) (not (regexMatch `config\.(slots|limits\.memory):` $malformed)) -}}
{{- if lt $budget (mulf 1048576.0 $config.slots) -}}
{{- $problems = append $problems (printf "config.limits.memory: found %v; expected at least 1MiB for each of config.slots, %v" ($limits.memory | default "32MiB") $config.slots) -}}
{{- end -}}
{{- end -}}
{{- $record := include "outrelay.bytes" ($limits.record | default "") | float64 -}}
{{- $envelope := include "outrelay.bytes" ($limits.envelope | default "900KiB") | float64 -}}
{{- if and (gt $record 0.0) (gt $envelope $record) (not (regexMatch `config\.limits\.(envelope|record):` $malformed)) -}}
{{- $problems = append $problems (printf "config.limits.envelope: found %v; expected at most config.limits.record, %v" ($limits.envelope | default "900KiB") $limits.record) -}}
{{- end -}}
{{- $hasLimit := dig "limits" "memory" "" .Values.resources | toString -}}
{{- if and $hasLimit (lt $limit (addf (mulf 1.5 $budget) 62914560.0)) (not (regexMatch `(config|resources)\.limits\.memory:` $malformed)) -}}
{{- $problems = append $problems (printf "resources.limits.memory: found %v; Kubernetes would kill the process at its usual size; expected at least 1.5 times config.limits.memory (%v) and 60Mi" (dig "limits" "memory" "" .Values.resources) ($limits.memory | default "32MiB")) -}}
{{- end -}}
{{- $request := include "outrelay.bytes" (dig "requests" "memory" "" .Values.resources) | float64 -}}
{{- if and $hasLimit (gt $request $limit) (not (regexMatch `resources\.(requests|limits)\.memory:` $malformed)) -}}
{{- $problems = append $problems (printf "resources.requests.memory: found %v; Kubernetes rejects a request above resources.limits.memory (%v)" (dig "requests" "memory" "" .Values.resources) (dig "limits" "memory" "" .Values.resources)) -}}
{{- end -}}

{{- $cpu := include "outrelay.bytes" (dig "limits" "cpu" "" .Values.resources) | float64 -}}
{{- if and (dig "limits" "cpu" "" .Values.resources | toString) (gt (include "outrelay.bytes" (dig "requests" "cpu" "" .Values.resources) | float64) $cpu) (not (regexMatch `resources\.(requests|limits)\.cpu:` $malformed)) -}}
{{- $problems = append $problems (printf "resources.requests.cpu: found %v; Kubernetes rejects a request above resources.limits.cpu (%v)" (dig "requests" "cpu" "" .Values.resources) (dig "limits" "cpu" "" .Values.resources)) -}}
{{- end -}}

{{- /* Optional objects. */ -}}
{{- $processes := int .Values.replicas -}}
{{- with .Values.keda -}}
{{- if .enabled -}}
{{- $processes = int .minReplicas -}}
{{- $slots := $config.slots | default 1 -}}
{{- if not .prometheus -}}
{{- $problems = append $problems "keda.prometheus is required: set the address of Prometheus, such as http://prometheus-operated.monitoring:9090" -}}
{{- end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- $problems = append $problems (printf "keda.minReplicas: found %d; expected at most keda.maxReplicas, %d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if not (kindIs "string" $slots) -}}
{{- if lt (int $slots) (int .maxReplicas) -}}
{{- $problems = append $problems (printf "keda.maxReplicas: found %d; expected at most config.slots, %d: further processes are standbys, which do not help" (int .maxReplicas) (int $slots)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.podDisruptionBudget -}}
{{- if .enabled -}}
{{- $most := toString .maxUnavailable -}}
{{- if has $most (list "0" "0%") -}}
{{- $problems = append $problems "podDisruptionBudget.maxUnavailable: found 0; no node with a pod could be drained; set it to 1" -}}
{{- /* Kubernetes rounds a share up. */ -}}
{{- else if or (and (hasSuffix "%" $most) (ge (ceil (divf (mulf (trimSuffix "%" $most | float64) (float64 $processes)) 100.0)) (float64 $processes))) (and (regexMatch "^[0-9]+$" $most) (ge (int $most) $processes)) -}}
{{- $problems = append $problems (printf "podDisruptionBudget.maxUnavailable: found %s of %d processes; the budget protects none; set fewer, or more replicas" $most $processes) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if .enabled -}}
{{- if not .metricsFrom -}}
{{- $problems = append $problems "networkPolicy.metricsFrom is required: list the peers that scrape /metrics" -}}
{{- end -}}
{{- if and $values.admin.enabled (not .adminFrom) -}}
{{- $problems = append $problems "networkPolicy.adminFrom is required with admin.enabled: list the peers that use the page and API" -}}
{{- end -}}
{{- if not .egress -}}
{{- $problems = append $problems "networkPolicy.egress is required: list rules for the name service, MongoDB and Kafka; without them, the pods reach nothing" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- with $problems -}}
{{- fail (printf "outrelay cannot run with these values:\n  %s" (. | uniq | join "\n  ")) -}}
{{- end -}}
{{- end -}}

{{- /* outrelay.texts lists the texts below value, each as a line {"path":…,"text":…}. */ -}}
{{- define "outrelay.texts" -}}
{{- $path := .path -}}
{{- if kindIs "map" .value -}}
{{- range $key, $value := .value -}}
{{- include "outrelay.texts" (dict "path" (printf "%s.%s" $path $key) "value" $value) -}}
{{- end -}}
{{- else if kindIs "slice" .value -}}
{{- range $i, $value := .value -}}
{{- include "outrelay.texts" (dict "path" (printf "%s[%d]" $path $i) "value" $value) -}}
{{- end -}}
{{- else if kindIs "string" .value -}}
{{- dict "path" $path "text" .value | toJson -}}{{- "\n" -}}
{{- end -}}
{{- end -}}

{{- /* outrelay.listenProblem returns why .who cannot reach the address .listen of a pod. */ -}}
{{- define "outrelay.listenProblem" -}}
{{- $host := regexReplaceAll ":[0-9]+$" .listen "" -}}
{{- $port := include "outrelay.portOf" .listen | int -}}
{{- if contains "${" .listen -}}
write the address itself, such as 0.0.0.0:9464: the ports of the pods and services are made from it
{{- else if not (regexMatch "^[^/]*:[0-9]+$" .listen) -}}
expected host:port, such as 0.0.0.0:9464
{{- else if regexMatch "^(127\\..*|localhost|\\[::1\\])$" $host -}}
{{ .who }} cannot reach an address that is local to the pod; set 0.0.0.0:{{ $port }}
{{- else if not (has $host (list "" "0.0.0.0" "[::]")) -}}
expected all addresses of the pod, such as 0.0.0.0:{{ $port }}: its own address is not known before it starts
{{- else if or (lt $port 1024) (gt $port 65535) -}}
expected a port between 1024 and 65535: the pod has no right to open a lower one
{{- end -}}
{{- end -}}

{{- /* outrelay.fileProblem returns why the pod has no file .file. It reads the secrets if Helm is connected to a cluster. */ -}}
{{- define "outrelay.fileProblem" -}}
{{- $values := .root.Values -}}
{{- $file := .file -}}
{{- if hasPrefix "/run/secrets/outrelay/" $file -}}
{{- $parts := $file | trimPrefix "/run/secrets/outrelay/" | splitList "/" -}}
{{- $name := first $parts -}}
{{- if or (ne (len $parts) 2) (not (last $parts)) -}}
found the file {{ $file }}; each secret has a directory: expected /run/secrets/outrelay/SECRET/KEY
{{- else if not (has $name $values.secrets) -}}
found the file {{ $file }}, but secrets does not list the secret {{ $name }}
{{- else -}}
{{- $secret := lookup "v1" "Secret" .root.Release.Namespace $name -}}
{{- if and $secret (not (hasKey ($secret.data | default dict) (last $parts))) -}}
the secret {{ $name }} has no key {{ last $parts }}; it has {{ keys ($secret.data | default dict) | sortAlpha | join ", " }}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $there := false -}}
{{- range $values.injectedPaths -}}{{- if hasPrefix (printf "%s/" (trimSuffix "/" .)) $file -}}{{- $there = true -}}{{- end -}}{{- end -}}
{{- range $values.extraVolumeMounts -}}
{{- if or (eq $file .mountPath) (hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) $file) -}}{{- $there = true -}}{{- end -}}
{{- end -}}
{{- if not $there -}}
the pod has no file {{ $file }}; put it into a secret, list the secret in secrets, and refer to /run/secrets/outrelay/SECRET/KEY, or add its volume to extraVolumes and extraVolumeMounts
{{- else if and (hasPrefix "/var/run/secrets/kubernetes.io/" $file) (not $values.serviceAccount.automountToken) -}}
the file {{ $file }} needs serviceAccount.automountToken
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* outrelay.seconds returns a duration such as 1m30s in seconds. A reference counts as 0. */ -}}
{{- define "outrelay.seconds" -}}
{{- $units := dict "ns" 0.000000001 "us" 0.000001 "µs" 0.000001 "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 -}}
{{- $total := 0.0 -}}
{{- if not (contains "${" (toString .)) -}}
{{- range regexFindAll "[0-9.]+(ns|us|µs|ms|s|m|h|d)" (toString .) -1 -}}
{{- $total = addf $total (mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[^0-9.]+$" .))) -}}
{{- end -}}
{{- end -}}
{{- $total -}}
{{- end -}}

{{- /* outrelay.bytes returns a size of the configuration or an amount of Kubernetes, such as 32MiB, 256Mi or 250m, as a number. A text of another form counts as 0. */ -}}
{{- define "outrelay.bytes" -}}
{{- $units := dict "B" 1.0 "m" 0.001 "k" 1e3 "kB" 1e3 "KB" 1e3 "M" 1e6 "MB" 1e6 "G" 1e9 "GB" 1e9 "Ki" 1024.0 "KiB" 1024.0 "Mi" 1048576.0 "MiB" 1048576.0 "Gi" 1073741824.0 "GiB" 1073741824.0 "T" 1e12 "Ti" 1099511627776.0 "P" 1e15 "Pi" 1125899906842624.0 "E" 1e18 "Ei" 1152921504606846976.0 -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . -}}{{- $text = printf "%.0f" . -}}{{- end -}}
{{- if regexMatch "^[0-9.]+ *[A-Za-z]*$" $text -}}
{{- $unit := regexFind "[A-Za-z]+$" $text | default "B" -}}
{{- printf "%.3f" (mulf (regexFind "^[0-9.]+" $text | float64) (get $units $unit | default 0.0)) -}}
{{- else -}}0{{- end -}}
{{- end -}}
