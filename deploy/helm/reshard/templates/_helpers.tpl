{{- define "reshard.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* The labels by which pods are chosen: they never change in the life of a release. */}}
{{- define "reshard.selector" -}}
app.kubernetes.io/name: reshard
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "reshard.labels" -}}
{{ include "reshard.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "reshard.workers" -}}
matchLabels:
  app.kubernetes.io/name: reshard
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [worker, worker-gpu]
{{- end }}

{{/* What all pods have in common: nobody is root, and nothing but /tmp can be written to. */}}
{{- define "reshard.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
{{- end }}

{{- define "reshard.container" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (default (dict) .values.image) -}}
image: {{ printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
envFrom:
  - configMapRef:
      name: {{ include "reshard.fullname" .root }}
  - secretRef:
      name: {{ .root.Values.existingSecret }}
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: tmp
    mountPath: /tmp
{{- end }}

{{- define "reshard.template" -}}
metadata:
  labels:
    {{- include "reshard.labels" . | nindent 4 }}
  annotations:
    # Pods read settings at their start: new ones make new pods.
    checksum/settings: {{ toJson .root.Values.settings | sha256sum }}
    {{- with .values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "reshard.worker" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "reshard.fullname" .root }}-{{ .component }}
  labels:
    {{- include "reshard.labels" . | nindent 4 }}
spec:
  # One job at a time in each. Do not scale on the length of the Redis list: running jobs are not in it.
  {{- if not (and .root.Values.autoscaling.enabled (eq .root.Values.autoscaling.kind .component)) }}
  replicas: {{ .values.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "reshard.selector" . | nindent 6 }}
  template:
    {{- include "reshard.template" . | nindent 4 }}
    spec:
      # A worker that is told to stop gives its job back within this time.
      terminationGracePeriodSeconds: 60
      {{- include "reshard.pod" . | nindent 6 }}
      containers:
        - name: worker
          args: ["worker", "--name", "worker"]
          env:
            - name: RESHARD_DEVICE
              value: {{ .device }}
          # A worker whose loop or whose job's supervisor hangs is started anew, and another one takes its job. One that
          # waits for Redis or PostgreSQL is alive.
          livenessProbe:
            exec:
              command: [python, -m, reshard_worker.alive, --name, worker]
            initialDelaySeconds: 30
            periodSeconds: 30
            timeoutSeconds: 10
          {{- include "reshard.container" . | nindent 10 }}
{{- end }}
