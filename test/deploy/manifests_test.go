package deploy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// meta holds the common fields of manifests.
type meta struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`
	Metadata   struct {
		Name, Namespace string
		Labels          map[string]string
	}
}

type probe struct {
	HTTPGet struct {
		Path, Port string
	} `yaml:"httpGet"`
	PeriodSeconds    int `yaml:"periodSeconds"`
	TimeoutSeconds   int `yaml:"timeoutSeconds"`
	FailureThreshold int `yaml:"failureThreshold"`
}

type labels struct {
	MatchLabels map[string]string `yaml:"matchLabels"`
}

type deployment struct {
	Spec struct {
		Replicas int
		Selector labels
		Strategy struct {
			RollingUpdate struct {
				MaxUnavailable int `yaml:"maxUnavailable"`
			} `yaml:"rollingUpdate"`
		}
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				AutomountServiceAccountToken  *bool `yaml:"automountServiceAccountToken"`
				TerminationGracePeriodSeconds int   `yaml:"terminationGracePeriodSeconds"`
				SecurityContext               struct {
					RunAsNonRoot   bool                  `yaml:"runAsNonRoot"`
					SeccompProfile struct{ Type string } `yaml:"seccompProfile"`
				} `yaml:"securityContext"`
				Containers []struct {
					Args  []string
					Env   []struct{ Name, Value string }
					Ports []struct {
						Name          string
						ContainerPort int `yaml:"containerPort"`
					}
					ReadinessProbe  probe `yaml:"readinessProbe"`
					LivenessProbe   probe `yaml:"livenessProbe"`
					StartupProbe    probe `yaml:"startupProbe"`
					SecurityContext struct {
						AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
						ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
						Capabilities             struct{ Drop []string }
					} `yaml:"securityContext"`
					Resources    struct{ Limits, Requests map[string]string }
					VolumeMounts []struct {
						Name      string
						MountPath string `yaml:"mountPath"`
						ReadOnly  bool   `yaml:"readOnly"`
					} `yaml:"volumeMounts"`
				}
				Volumes []struct {
					Name   string
					Secret struct {
						SecretName string `yaml:"secretName"`
					}
				}
			}
		}
	}
}

// readManifests returns the manifests of deploy/kubernetes and of its components by kind.
func readManifests(t *testing.T) map[string][]byte {
	t.Helper()
	root := repoPath(t, "deploy", "kubernetes")
	files, err := filepath.Glob(root + "/*.yaml")
	components, componentsErr := filepath.Glob(root + "/components/*/[^k]*.yaml")
	if err != nil || componentsErr != nil || len(files) == 0 || len(components) == 0 {
		t.Fatalf("%v %v %v %v", files, components, err, componentsErr)
	}
	files = append(files, components...)

	out := map[string][]byte{}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}

		d := yaml.NewDecoder(bytes.NewReader(raw))
		for {
			var node yaml.Node
			if err := d.Decode(&node); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", file, err) // also for duplicate keys
			}

			var m meta
			var whole map[string]any
			if err := errors.Join(node.Decode(&m), node.Decode(&whole)); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if m.Kind == "" || m.APIVersion == "" || out[m.Kind] != nil {
				t.Errorf("%s: no kind or version, or a second %s", file, m.Kind)
			}
			if m.Kind != "Kustomization" && m.Kind != "Namespace" && (m.Metadata.Name != "outrelay" || m.Metadata.Namespace != "outrelay") {
				t.Errorf("%s: name is %s/%s, want outrelay/outrelay", file, m.Metadata.Namespace, m.Metadata.Name)
			}
			if out[m.Kind], err = yaml.Marshal(whole); err != nil {
				t.Fatal(err)
			}
		}
	}
	return out
}

func decodeManifest[T any](t *testing.T, raw []byte) (v T) {
	t.Helper()
	if raw == nil {
		t.Fatal("the manifest does not exist")
	}
	if err := yaml.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestKubernetesDeployment(t *testing.T) {
	t.Parallel()
	d := decodeManifest[deployment](t, readManifests(t)["Deployment"])
	pod := d.Spec.Template.Spec
	if d.Spec.Replicas != 2 || d.Spec.Strategy.RollingUpdate.MaxUnavailable != 0 {
		t.Errorf("%d replicas with %d unavailable in a rollout, want 2 with 0", d.Spec.Replicas, d.Spec.Strategy.RollingUpdate.MaxUnavailable)
	}
	if limit := config.Default().Lease.Drain + config.Default().Lease.TTL; time.Duration(pod.TerminationGracePeriodSeconds)*time.Second <= limit {
		t.Errorf("terminationGracePeriodSeconds is %d, but a drain and release may take %s", pod.TerminationGracePeriodSeconds, limit)
	}
	if !pod.SecurityContext.RunAsNonRoot || pod.SecurityContext.SeccompProfile.Type != "RuntimeDefault" || pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		t.Errorf("the pod has more permissions than needed: %+v", pod.SecurityContext)
	}
	if len(pod.Containers) != 1 {
		t.Fatalf("%d containers", len(pod.Containers))
	}

	c := pod.Containers[0]
	if s := c.SecurityContext; !s.ReadOnlyRootFilesystem || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) {
		t.Errorf("the container has more permissions than needed: %+v", s)
	}

	for name, p := range map[string]probe{"/readyz": c.ReadinessProbe, "/livez": c.LivenessProbe} {
		if p.HTTPGet.Path != name || p.HTTPGet.Port != "http" || p.TimeoutSeconds < 1 || p.PeriodSeconds < p.TimeoutSeconds || p.FailureThreshold < 2 {
			t.Errorf("probe of %s: %+v", name, p)
		}
	}

	if port := readListenPort(t); len(c.Ports) != 1 || c.Ports[0].ContainerPort != port {
		t.Errorf("the container has the ports %+v, want port %d of http.listen", c.Ports, port)
	}
	if c.StartupProbe.HTTPGet.Path != "/livez" || len(c.Ports) != 1 || c.Ports[0].Name != "http" || c.Resources.Limits["memory"] == "" || c.Resources.Requests["cpu"] == "" {
		t.Errorf("startup probe, ports or resources: %+v %+v %+v", c.StartupProbe, c.Ports, c.Resources)
	}

	for _, m := range c.VolumeMounts {
		mounted := false
		for _, v := range pod.Volumes {
			// The configuration refers to /run/secrets/outrelay/SECRET/KEY, as with the chart.
			isPlace := v.Secret.SecretName == "" || m.MountPath == "/run/secrets/outrelay/"+v.Secret.SecretName
			mounted = mounted || v.Name == m.Name && isPlace
		}
		if !m.ReadOnly || !mounted {
			t.Errorf("mount %s is writable, has no volume, or is not in the directory of its secret: %s", m.Name, m.MountPath)
		}
	}

	for _, e := range c.Env {
		if strings.HasPrefix(e.Name, "OUTRELAY_") && !slices.ContainsFunc(config.Keys(), func(k string) bool { return config.EnvName(k) == e.Name }) {
			t.Errorf("the variable %s is not a configuration key", e.Name)
		}
	}

	if !slices.Equal(c.Args, []string{"run", "--config", "/etc/outrelay/outrelay.yaml"}) {
		t.Errorf("args %v", c.Args)
	}
}

// readListenPort returns the port of http.listen in the configuration of deploy/kubernetes.
func readListenPort(t *testing.T) int {
	t.Helper()
	configuration := decodeManifest[struct{ HTTP struct{ Listen string } }](t, readRepoFile(t, "deploy", "kubernetes", "config", "outrelay.yaml"))
	_, text, err := net.SplitHostPort(configuration.HTTP.Listen)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

func TestKubernetesBesides(t *testing.T) {
	t.Parallel()
	all := readManifests(t)
	d := decodeManifest[deployment](t, all["Deployment"])
	pods := d.Spec.Template.Metadata.Labels
	selects := func(what string, sel map[string]string, of map[string]string) {
		t.Helper()
		if len(sel) == 0 {
			t.Errorf("%s has an empty selector", what)
		}
		for k, v := range sel {
			if of[k] != v {
				t.Errorf("%s selects %s=%s, but the labels are %v", what, k, v, of)
			}
		}
	}

	selects("the deployment", d.Spec.Selector.MatchLabels, pods)
	type pdb struct {
		Spec struct {
			MaxUnavailable int `yaml:"maxUnavailable"`
			Selector       labels
		}
	}
	b := decodeManifest[pdb](t, all["PodDisruptionBudget"])
	if selects("the disruption budget", b.Spec.Selector.MatchLabels, pods); b.Spec.MaxUnavailable != 1 {
		t.Errorf("maxUnavailable is %d, want 1", b.Spec.MaxUnavailable)
	}

	type service struct {
		meta `yaml:",inline"`
		Spec struct {
			Selector map[string]string
			Ports    []struct {
				Name       string
				Port       int
				TargetPort string `yaml:"targetPort"`
			}
		}
	}
	s := decodeManifest[service](t, all["Service"])
	if selects("the service", s.Spec.Selector, pods); len(s.Spec.Ports) != 1 || s.Spec.Ports[0].TargetPort != "http" || s.Spec.Ports[0].Port != readListenPort(t) {
		t.Errorf("ports of the service: %+v", s.Spec.Ports)
	}

	type monitor struct {
		Spec struct {
			Selector  labels
			Endpoints []struct{ Port, Path string }
		}
	}
	m := decodeManifest[monitor](t, all["ServiceMonitor"])
	selects("the monitor", m.Spec.Selector.MatchLabels, s.Metadata.Labels)
	if len(m.Spec.Endpoints) != 1 || m.Spec.Endpoints[0].Port != s.Spec.Ports[0].Name || m.Spec.Endpoints[0].Path != "/metrics" {
		t.Errorf("endpoints of the monitor: %+v", m.Spec.Endpoints)
	}

	type list struct{ Resources, Components []string }
	base := decodeManifest[list](t, all["Kustomization"])
	for _, file := range base.Resources {
		repoPath(t, "deploy", "kubernetes", file)
	}
	// What needs an operator, or what not everybody wants, is a component that the user adds.
	if want := []string{"namespace.yaml", "serviceaccount.yaml", "deployment.yaml", "service.yaml"}; !slices.Equal(base.Resources, want) || base.Components != nil {
		t.Errorf("the base has %v and %v, want %v", base.Resources, base.Components, want)
	}
	for _, component := range []string{"disruption-budget", "service-monitor"} {
		c := decodeManifest[list](t, readRepoFile(t, "deploy", "kubernetes", "components", component, "kustomization.yaml"))
		if len(c.Resources) != 1 {
			t.Fatalf("component %s: %v", component, c.Resources)
		}
		repoPath(t, "deploy", "kubernetes", "components", component, c.Resources[0])
	}
}

// TestKubernetesConfigurationLoads loads the configuration of the manifests with the files of the secret.
func TestKubernetesConfigurationLoads(t *testing.T) {
	t.Parallel()
	all := readManifests(t)
	type secret struct {
		StringData map[string]string `yaml:"stringData"`
	}
	dir := t.TempDir()
	mounted := filepath.Join(dir, decodeManifest[meta](t, all["Secret"]).Metadata.Name)
	if err := os.Mkdir(mounted, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range decodeManifest[secret](t, all["Secret"]).StringData {
		if err := os.WriteFile(filepath.Join(mounted, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	// The ConfigMap is generated of this file.
	text := strings.ReplaceAll(string(readRepoFile(t, "deploy", "kubernetes", "config", "outrelay.yaml")), "/run/secrets/outrelay", dir)
	file := filepath.Join(dir, "outrelay.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	cfg, warnings, err := config.Load(file, nil, nil)
	if err != nil || len(warnings) > 0 {
		t.Fatalf("%v %v", err, warnings)
	}
	if strings.Contains(text, "password") {
		t.Error("the configuration contains a password")
	}

	// The manifests repeat the port of http.listen.
	port, isOpen := strings.CutPrefix(cfg.HTTP.Listen, "0.0.0.0:")
	container := decodeManifest[deployment](t, all["Deployment"]).Spec.Template.Spec.Containers[0]
	service := decodeManifest[struct {
		Spec struct{ Ports []struct{ Port int } }
	}](t, all["Service"])
	address := ""
	for _, e := range container.Env {
		if e.Name == "OUTRELAY_ADDRESS" {
			address = e.Value
		}
	}
	if !isOpen || strconv.Itoa(container.Ports[0].ContainerPort) != port || strconv.Itoa(service.Spec.Ports[0].Port) != port || address != "$(POD_IP):"+port {
		t.Errorf("listens on %s, but the container has %+v and %s, and the service %+v", cfg.HTTP.Listen, container.Ports, address, service.Spec.Ports)
	}
}

// readUnit returns the directives of the systemd unit by section.
func readUnit(t *testing.T) map[string]map[string][]string {
	t.Helper()
	out := map[string]map[string][]string{}
	section := ""
	for i, line := range strings.Split(string(readRepoFile(t, "deploy", "systemd", "outrelay.service")), "\n") {
		switch line = strings.TrimSpace(line); {
		case line == "" || strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "["):
			section = strings.Trim(line, "[]")
			out[section] = map[string][]string{}
		default:
			name, value, ok := strings.Cut(line, "=")
			if !ok || section == "" || !regexp.MustCompile(`^[A-Z][A-Za-z]+$`).MatchString(name) {
				t.Fatalf("line %d is invalid: %q", i+1, line)
			}
			out[section][name] = append(out[section][name], value)
		}
	}

	return out
}

func TestSystemdUnit(t *testing.T) {
	t.Parallel()
	u := readUnit(t)
	s := u["Service"]
	one := func(name string) string {
		if len(s[name]) != 1 {
			return strings.Join(s[name], " ")
		}
		return s[name][0]
	}

	for name, want := range map[string]string{
		"Type": "notify", "NotifyAccess": "main", "Restart": "always", "RestartPreventExitStatus": "1", "KillMode": "mixed",
		"DynamicUser": "yes", "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes",
		"ProtectKernelTunables": "yes", "ProtectKernelModules": "yes", "ProtectKernelLogs": "yes", "ProtectControlGroups": "yes", "ProtectClock": "yes",
		"ProtectHostname": "yes", "ProtectProc": "invisible", "CapabilityBoundingSet": "", "RestrictNamespaces": "yes", "RestrictSUIDSGID": "yes",
		"RestrictRealtime": "yes", "LockPersonality": "yes", "MemoryDenyWriteExecute": "yes", "SystemCallArchitectures": "native", "UMask": "0077",
		"ExecStart": "/usr/local/bin/outrelay run --config /etc/outrelay/outrelay.yaml",
	} {
		if _, there := s[name]; !there || one(name) != want {
			t.Errorf("%s is %q, want %q", name, one(name), want)
		}
	}

	if !strings.Contains(one("RestrictAddressFamilies"), "AF_UNIX") {
		t.Error("RestrictAddressFamilies does not allow AF_UNIX, which notifications to systemd need")
	}

	seconds := func(name string) time.Duration {
		d, err := time.ParseDuration(one(name) + "s")
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return d
	}

	if limit := config.Default().Lease.Drain + config.Default().Lease.TTL; seconds("TimeoutStopSec") <= limit {
		t.Errorf("TimeoutStopSec must exceed %s, the maximum time of a drain and release", limit)
	}
	if d := seconds("WatchdogSec"); d < 30*time.Second || d > 5*time.Minute {
		t.Errorf("WatchdogSec is %s, want 30s to 5m", d)
	}
	if !slices.Equal(u["Install"]["WantedBy"], []string{"multi-user.target"}) || u["Unit"]["Description"] == nil {
		t.Error("the unit has no description or a wrong WantedBy")
	}
}
