{{- define "outrelay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "outrelay.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "outrelay.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "outrelay.selector" -}}
app.kubernetes.io/name: {{ include "outrelay.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "outrelay.labels" -}}
{{ include "outrelay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "outrelay.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "outrelay.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "outrelay.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag -}}
{{- end -}}
{{- end -}}

{{- /* The addresses of the two listeners. The defaults are those of the program. */ -}}
{{- define "outrelay.listen" -}}
{{- $http := .Values.config.http | default dict -}}
{{- $http.listen | default "127.0.0.1:9464" -}}
{{- end -}}
{{- define "outrelay.adminListen" -}}
{{- $http := .Values.config.http | default dict -}}
{{- $admin := $http.admin | default dict -}}
{{- $admin.listen | default "127.0.0.1:9465" -}}
{{- end -}}

{{- /* The port of an address host:port. */ -}}
{{- define "outrelay.portOf" -}}
{{- regexFind "[0-9]+$" . -}}
{{- end -}}

{{- /* A digest of the secrets, so that a change rolls the pods: configuration is read at the start. */ -}}
{{- define "outrelay.secretsChecksum" -}}
{{- $all := list -}}
{{- range .Values.secrets -}}
{{- $secret := lookup "v1" "Secret" $.Release.Namespace . | default dict -}}
{{- $all = append $all (get $secret "data" | default dict | toJson) -}}
{{- end -}}
{{- $all | join "|" | sha256sum -}}
{{- end -}}
