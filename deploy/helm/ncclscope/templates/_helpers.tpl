{{- define "ncclscope.name" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "ncclscope.selector" -}}
app.kubernetes.io/name: ncclscope
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ncclscope.labels" -}}
{{ include "ncclscope.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "ncclscope.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 1) }}
{{- end -}}
{{- end }}

{{- define "ncclscope.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "ncclscope.endpoint" -}}
port: http
path: /metrics
interval: {{ .Values.monitoring.interval }}
honorLabels: true
{{- if not .Values.security.insecure }}
scheme: https
tlsConfig:
  ca:
    secret:
      name: {{ .Values.security.tlsSecret }}
      key: ca.crt
  serverName: {{ include "ncclscope.name" . }}.{{ .Release.Namespace }}.svc
authorization:
  credentials:
    name: {{ .Values.security.tokensSecret }}
    key: reader.token
{{- end }}
{{- end }}
