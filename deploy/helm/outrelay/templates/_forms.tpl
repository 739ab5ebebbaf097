{{- /*
outrelay.formProblems lists the values whose text has another form than expected, and those outside of their range, one per line. Helm would
report the expression of a schema, without an example. files/forms.json has the forms of the configuration.
*/ -}}
{{- define "outrelay.formProblems" -}}
{{- $config := .Values.config -}}
{{- range $path, $form := .Files.Get "files/forms.json" | fromJson -}}
{{- $value := $config -}}
{{- range splitList "." $path -}}
{{- $value = index ($value | default dict) . -}}
{{- end -}}
{{- include "outrelay.formProblem" (dict "path" (printf "config.%s" $path) "value" $value "pattern" $form.pattern "expected" $form.expected "range" $form.range) -}}
{{- end -}}

{{- $name := "^([a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?)?$" -}}
{{- $expectedName := "expected at most 53 lower-case letters, digits and dashes; a dash only between them" -}}
{{- $directory := dict "pattern" "^/" "expected" "expected a path that begins with /" -}}
{{- $subdomain := "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*" -}}
{{- $expectedObject := "expected the name of an object: lower-case letters, digits, dash, dot" -}}
{{- $object := dict "pattern" (printf "^%s$" $subdomain) "expected" $expectedObject -}}
{{- $optional := dict "pattern" (printf "^(%s)?$" $subdomain) "expected" $expectedObject -}}
{{- range list
  (dict "path" "image.tag" "value" .Values.image.tag "pattern" "^([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?$" "expected" "expected letters, digits, dot, dash, underscore; at most 128")
  (dict "path" "image.digest" "value" .Values.image.digest "pattern" "^(sha256:[0-9a-f]{64})?$" "expected" "expected sha256: and 64 hexadecimal digits")
  (dict "path" "fullnameOverride" "value" .Values.fullnameOverride "pattern" $name "expected" $expectedName)
  (dict "path" "nameOverride" "value" .Values.nameOverride "pattern" $name "expected" $expectedName)
  (merge (dict "path" "secrets" "value" .Values.secrets) $object)
  (merge (dict "path" "priorityClassName" "value" .Values.priorityClassName) $optional)
  (merge (dict "path" "serviceAccount.name" "value" .Values.serviceAccount.name) $optional)
  (merge (dict "path" "injectedPaths" "value" .Values.injectedPaths) $directory)
  (dict "path" "serviceMonitor.interval" "value" .Values.serviceMonitor.interval "pattern" "^([0-9]+(ms|s|m|h))+$" "expected" "expected a duration such as 15s")
  (dict "path" "podDisruptionBudget.maxUnavailable" "value" .Values.podDisruptionBudget.maxUnavailable "pattern" "^([0-9]+|[0-9]{1,2}%|100%)$" "expected" "expected a number such as 1, or a share such as 50%")
  (dict "path" "keda.prometheus" "value" .Values.keda.prometheus "pattern" "^(https?://[^/].*)?$" "expected" "expected an address such as http://prometheus-operated.monitoring:9090")
  (dict "path" "keda.lagSeconds" "value" .Values.keda.lagSeconds "pattern" "^[0-9]+(\\.[0-9]+)?$" "expected" "expected a number of seconds in quotes, such as \"30\"")
-}}
{{- include "outrelay.formProblem" . -}}
{{- end -}}
{{- range $i, $secret := .Values.imagePullSecrets -}}
{{- include "outrelay.formProblem" (merge (dict "path" (printf "imagePullSecrets[%d].name" $i) "value" $secret.name) $object) -}}
{{- end -}}
{{- range $i, $volume := .Values.extraVolumes -}}
{{- include "outrelay.formProblem" (dict "path" (printf "extraVolumes[%d].name" $i) "value" $volume.name "pattern" "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$" "expected" "expected at most 63 lower-case letters, digits and dashes") -}}
{{- end -}}
{{- range $i, $variable := .Values.extraEnv -}}
{{- include "outrelay.formProblem" (dict "path" (printf "extraEnv[%d].name" $i) "value" $variable.name "pattern" "^[-._a-zA-Z][-._a-zA-Z0-9]*$" "expected" "expected letters, digits, dot, dash, underscore") -}}
{{- end -}}

{{- /* Amounts, and keys and values of labels, are those of Kubernetes. */ -}}
{{- range $kind, $amounts := .Values.resources -}}
{{- if kindIs "map" $amounts -}}
{{- range $name, $amount := $amounts -}}
{{- $path := printf "resources.%s.%s" $kind $name -}}
{{- include "outrelay.formProblem" (dict "path" $path "value" $amount "pattern" "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$" "expected" "expected an amount such as 250m of cpu or 256Mi of memory") -}}
{{- if not (or (has $name (list "cpu" "memory" "ephemeral-storage")) (hasPrefix "hugepages-" $name) (contains "/" $name)) -}}
{{- printf "%s: Kubernetes has no such resource; expected cpu, memory or ephemeral-storage\n" $path -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $labels := dict "podLabels" .Values.podLabels "nodeSelector" .Values.nodeSelector "serviceMonitor.labels" .Values.serviceMonitor.labels "prometheusRule.labels" .Values.prometheusRule.labels "dashboard.labels" .Values.dashboard.labels -}}
{{- range $section, $map := $labels -}}
{{- range $key, $value := $map -}}
{{- include "outrelay.formProblem" (dict "path" (printf "%s.%s" $section $key) "value" $value "pattern" "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$" "expected" "expected at most 63 letters, digits, dash, underscore, dot; the first and the last a letter or digit") -}}
{{- end -}}
{{- end -}}
{{- range $section, $map := merge (dict "podAnnotations" .Values.podAnnotations "serviceAccount.annotations" .Values.serviceAccount.annotations) $labels -}}
{{- range $key, $ignored := $map -}}
{{- include "outrelay.formProblem" (dict "path" $section "value" $key "pattern" (printf "^(%s/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$" $subdomain) "expected" "expected a key such as team or example.com/team") -}}
{{- end -}}
{{- end -}}
{{- range $i, $mount := .Values.extraVolumeMounts -}}
{{- include "outrelay.formProblem" (merge (dict "path" (printf "extraVolumeMounts[%d].mountPath" $i) "value" $mount.mountPath) $directory) -}}
{{- end -}}
{{- end -}}

{{- /* outrelay.formProblem returns a line for each text of .value that does not match .pattern or is not in .range. */ -}}
{{- define "outrelay.formProblem" -}}
{{- $items := list .value -}}
{{- $isList := kindIs "slice" .value -}}
{{- $isText := and (kindIs "string" .value) (has .path (list "config.watch" "config.kafka.brokers" "config.topics.allow" "config.consumers.databases" "config.tasks")) -}}
{{- if $isList -}}
{{- $items = .value -}}
{{- else if $isText -}}
{{- $items = regexSplit " *, *" (trim .value) -1 -}}
{{- end -}}
{{- range $i, $item := $items -}}
{{- $text := toString $item -}}
{{- if kindIs "float64" $item -}}{{- $text = printf "%.0f" $item -}}{{- end -}}
{{- $expected := "" -}}
{{- if and $.pattern (not (regexMatch $.pattern $text)) -}}
{{- $expected = $.expected -}}
{{- else if $.range -}}
{{- $number := include (get (dict "duration" "outrelay.seconds" "size" "outrelay.bytes" "number" "outrelay.number") $.range.kind) $item | float64 -}}
{{- if and (or (lt $number $.range.low) (gt $number $.range.high)) (not (and $.range.zero (eq $number 0.0))) -}}
{{- $expected = $.range.expected -}}
{{- end -}}
{{- end -}}
{{- /* A key without a value has its default. */ -}}
{{- /* The program ignores a part of a text without content, such as that after the last comma. */ -}}
{{- $ignored := or (kindIs "invalid" $item) (contains "${" $text) (and $isText (eq $text "")) -}}
{{- if and $expected (not $ignored) -}}
{{- $found := contains "@" $text | ternary "a text with an @" (printf "%q" $text) -}}
{{- printf "%s%s: found %s; %s\n" $.path ($isList | ternary (printf "[%d]" $i) "") $found $expected -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "outrelay.number" -}}
{{- kindIs "float64" . | ternary (printf "%.0f" .) (toString .) -}}
{{- end -}}
