{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "tandem.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tandem.fullname" -}}
{{- .Values.fullnameOverride | default (include "tandem.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ include "tandem.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "tandem.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "tandem.fullname" .) }}{{ else }}{{ required "serviceAccount.name is needed where it is not created" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "tandem.image" -}}
{{- $repository := required "image.repository has to be set: build the image (make image) and push it" .Values.image.repository -}}
{{- if .Values.image.digest }}{{ $repository }}@{{ .Values.image.digest }}{{ else }}{{ $repository }}:{{ required "image.tag or image.digest has to be set" .Values.image.tag }}{{ end }}
{{- end }}

{{- define "tandem.kubeProxyConfiguration" -}}
{{- $kubeProxy := dict
  "apiVersion" "kubeproxy.config.k8s.io/v1alpha1"
  "kind" "KubeProxyConfiguration"
  "mode" .Values.mode
  "clusterCIDR" (kindIs "slice" .Values.clusterCIDR | ternary (join "," .Values.clusterCIDR) .Values.clusterCIDR)
  "metricsBindAddress" .Values.metricsBindAddress
  "clientConnection" (dict "kubeconfig" "/var/lib/kube-proxy/kubeconfig.conf") }}
{{- toYaml (mustMergeOverwrite $kubeProxy (deepCopy .Values.config)) }}
{{- end }}

{{/* A file that upstream's kube-proxy can read as well; the second document has Tandem's own options. */}}
{{- define "tandem.config" -}}
{{- include "tandem.kubeProxyConfiguration" . }}
{{- $tandem := dict "apiVersion" "config.tandem-proxy.dev/v1alpha1" "kind" "TandemConfiguration" }}
{{- if eq .Values.mode "ebpf" }}{{ $_ := set $tandem "ebpf" (dict "cgroupRoot" "/host/cgroup") }}{{ end }}
---
{{ toYaml (mustMergeOverwrite $tandem (deepCopy .Values.tandem)) }}
{{- end }}

{{- define "tandem.kubeconfig" -}}
apiVersion: v1
kind: Config
clusters:
- name: default
  cluster:
    certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
    server: {{ required "apiServer has to be set: the address by which nodes reach it without Services" .Values.apiServer }}
contexts:
- name: default
  context: {cluster: default, namespace: default, user: default}
current-context: default
users:
- name: default
  user: {tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token}
{{- end }}
