package deploy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

var helmFlag = flag.String("deploy.helm", "", "the helm program; default: the helm that .ci/run has installed")

var helmVersion = regexp.MustCompile(`(?m)^HELM_VERSION=(\S+)$`)

// findHelm returns the path of helm. If .ci/run has installed none on this machine, it skips the test.
func findHelm(t *testing.T) string {
	t.Helper()
	if *helmFlag != "" {
		return *helmFlag
	}

	// Other versions have other messages.
	tools := os.Getenv("OUTRELAY_CI_TOOLS")
	if cache, err := os.UserCacheDir(); tools == "" && err == nil {
		tools = filepath.Join(cache, "outrelay-ci")
	}
	version := helmVersion.FindSubmatch(readRepoFile(t, ".ci", "run"))
	if version == nil {
		t.Fatal(".ci/run names no version of helm")
	}
	installed := filepath.Join(tools, string(version[1]), "helm")
	if _, err := os.Stat(installed); err == nil {
		return installed
	}
	stacktest.OnlyWith(t, ".ci/run charts has not installed helm on this machine", "deploy.helm")
	return ""
}

// renderChart returns the output of `helm template` with values, each of which overrides the values before. It returns the message of
// helm as an error.
func renderChart(t *testing.T, values ...string) (string, error) {
	t.Helper()
	args := []string{"template", "outrelay", repoPath(t, "deploy", "helm", "outrelay"), "--namespace", "events", "--kube-version", "1.31.0"}
	for i, text := range values {
		file := filepath.Join(t.TempDir(), strconv.Itoa(i)+".yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "-f", file)
	}
	return runHelm(t, args...)
}

func runHelm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, findHelm(t), args...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	// Neither the cluster nor the settings of this user count.
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir(), "KUBECONFIG=/dev/null")

	if err := cmd.Run(); err != nil {
		if errOut.Len() == 0 {
			t.Fatal(err)
		}
		return "", errors.New(errOut.String())
	}
	return out.String(), nil
}

// The chart itself has no default that only looks as if it could run, and lists everything that is missing.
func TestChartAsksForWhatItCannotKnow(t *testing.T) {
	t.Parallel()
	_, err := renderChart(t)
	if err == nil {
		t.Fatal("the chart can be rendered without values")
	}
	for _, want := range []string{"image.repository is required", "image.tag is required", "config.kafka.brokers is required"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

// rendered has the fields of the manifests that depend on each other.
type rendered struct {
	meta `yaml:",inline"`
	Data map[string]string
	Spec struct {
		Replicas *int
		Template struct {
			Spec struct {
				Containers []struct {
					Image string
					Env   []struct{ Name, Value string }
					Ports []struct {
						Name          string
						ContainerPort int `yaml:"containerPort"`
					}
					ReadinessProbe probe `yaml:"readinessProbe"`
					LivenessProbe  probe `yaml:"livenessProbe"`
					StartupProbe   probe `yaml:"startupProbe"`
					VolumeMounts   []struct {
						Name      string
						MountPath string `yaml:"mountPath"`
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
		SessionAffinity string `yaml:"sessionAffinity"`
		Ports           []struct {
			Name       string
			Port       int
			TargetPort string `yaml:"targetPort"`
		}
		Endpoints []struct{ Port string }
		Ingress   []struct {
			Ports []struct{ Port int }
		}
	}
}

// decodeRendered returns the manifests of a rendered chart by kind and name.
func decodeRendered(t *testing.T, text string) map[string]rendered {
	t.Helper()
	all := map[string]rendered{}

	d := yaml.NewDecoder(strings.NewReader(text))
	for {
		var r rendered
		if err := d.Decode(&r); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if r.Kind != "" {
			all[r.Kind+"/"+r.Metadata.Name] = r
		}
	}
}

// Values that can run are rendered: the program accepts the configuration, ports and probes follow the listeners, and secrets have
// a directory each.
func TestChartRendersRightValues(t *testing.T) {
	t.Parallel()
	const admin = `token: "${file:/run/secrets/outrelay/outrelay/token}"`
	for name, c := range map[string]struct {
		file, values string
		port, admin  int    // admin is 0 without a service for operators
		image        string // if it matters
		mounts       []string
		objects      []string // in addition to those that are always there
	}{
		"minimal":         {port: 9464, image: "registry.example.com/outrelay:1.0.0", mounts: []string{"outrelay"}},
		"all interfaces":  {values: `config: {http: {listen: ":8080"}}`, port: 8080},
		"IPv4":            {values: `config: {http: {listen: "0.0.0.0:8080"}}`, port: 8080},
		"IPv6":            {values: `config: {http: {listen: "[::]:8080"}}`, port: 8080},
		"one process":     {values: `replicas: 1`, port: 9464},
		"digest":          {values: `image: {digest: "sha256:` + strings.Repeat("a", 64) + `"}`, port: 9464, image: "registry.example.com/outrelay@sha256:" + strings.Repeat("a", 64)},
		"registry's port": {values: `image: {repository: "registry.example.com:5000/a/outrelay"}`, port: 9464, image: "registry.example.com:5000/a/outrelay:1.0.0"},
		"operators": {
			values: `{admin: {enabled: true}, config: {http: {admin: {listen: "0.0.0.0:9465", ` + admin + `}}}}`,
			port:   9464, admin: 9465, objects: []string{"Service/outrelay-admin"},
		},
		"operators by port-forward": {values: `config: {http: {admin: {` + admin + `}}}`, port: 9464},
		"two secrets with one key": {
			values: `{secrets: [outrelay, mongodb-ca, kafka-ca], config: {mongodb: {tls: {ca: /run/secrets/outrelay/mongodb-ca/ca.crt}}, kafka: {tls: {ca: /run/secrets/outrelay/kafka-ca/ca.crt}}}}`,
			port:   9464, mounts: []string{"outrelay", "mongodb-ca", "kafka-ca"},
		},
		"scram over TLS": {
			values: `config: {kafka: {sasl: {mechanism: scram-sha-512, username: relay, password: "${file:/run/secrets/outrelay/outrelay/kafka-password}"}, tls: {}}}`, port: 9464,
		},
		"password in a reference": {values: `config: {mongodb: {uri: "mongodb://relay:${file:/run/secrets/outrelay/outrelay/password}@mongodb:27017/shop"}}`, port: 9464},
		"no secret at all":        {values: `{secrets: [], config: {mongodb: {uri: "mongodb://mongodb:27017/shop?replicaSet=rs0"}}}`, port: 9464},
		"variable": {
			values: `{extraEnv: [{name: REGION, value: eu}], config: {watcher: "shop-${env:REGION}"}}`, port: 9464,
		},
		"escaped reference":  {values: `config: {kafka: {sasl: {mechanism: plain, username: "$${env:X}", password: "${file:/run/secrets/outrelay/outrelay/x}"}}}`, port: 9464},
		"injected secrets":   {values: `{secrets: [], config: {mongodb: {uri: "${file:/vault/secrets/mongodb-uri}"}}}`, port: 9464},
		"own injector":       {values: `{secrets: [], injectedPaths: [/injected], config: {mongodb: {uri: "${file:/injected/uri}"}}}`, port: 9464},
		"volume of the user": {values: `{extraVolumes: [{name: ca, configMap: {name: ca}}], extraVolumeMounts: [{name: ca, mountPath: /certs}], config: {mongodb: {tls: {ca: /certs/ca.crt}}}}`, port: 9464},
		"token of Kubernetes": {
			values: `{serviceAccount: {automountToken: true}, config: {kafka: {tls: {}, sasl: {mechanism: oauthbearer, token: {file: /var/run/secrets/kubernetes.io/serviceaccount/token}}}}}`, port: 9464,
		},
		"long drain":         {values: `{terminationGracePeriodSeconds: 90, config: {lease: {drain: 1m, ttl: 10s}}}`, port: 9464},
		"much memory":        {values: `{resources: {limits: {memory: 1Gi}}, config: {limits: {memory: 512MiB}}}`, port: 9464},
		"memory of no limit": {values: `{resources: {limits: null}, config: {limits: {memory: 2GiB}}}`, port: 9464},
		"all forms": {
			values: `{config: {retention: 0, start: 2026-11-20, lease: {ttl: 1m, renew: 1.5s, drain: 0}, limits: {memory: 33554432, record: 2 MiB}, watch: "shop.outbox, tenant_*.outbox",
				kafka: {brokers: "k1:9092,", compression: lz4}, tasks: "relay, cleaner", dead_letters: {expire: 30d}}, terminationGracePeriodSeconds: 61}`,
			port: 9464,
		},
		"amounts and labels": {
			values: `{resources: {requests: {cpu: 0.5, memory: 1.5e8}, limits: {cpu: 2, memory: 0.5Gi, ephemeral-storage: 1Gi, example.com/x: 1}}, podLabels: {example.com/team: a_b.c, empty: ""},
				nodeSelector: {kubernetes.io/arch: amd64}, podAnnotations: {a: "any text"}, tolerations: [{operator: Exists}], affinity: {podAntiAffinity: {}}, priorityClassName: high.a-1}`,
			port: 9464,
		},
		"half may be away": {values: `{replicas: 4, podDisruptionBudget: {enabled: true, maxUnavailable: "50%"}}`, port: 9464, objects: []string{"PodDisruptionBudget/outrelay"}},
		"everything": {
			file: "all-values.yaml", port: 8080, admin: 8081,
			mounts: []string{"outrelay", "outrelay-admin", "mongodb-ca", "kafka-ca"},
			objects: []string{
				"Service/outrelay-admin", "PodDisruptionBudget/outrelay", "ServiceMonitor/outrelay", "PrometheusRule/outrelay",
				"ConfigMap/outrelay-dashboard", "NetworkPolicy/outrelay", "ScaledObject/outrelay",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := c.file
			if file == "" {
				file = "minimal-values.yaml"
			}
			text, err := renderChart(t, string(chartFile(t, "ci", file)), c.values)
			if err != nil {
				t.Fatal(err)
			}
			all := decodeRendered(t, text)
			want := append([]string{"ConfigMap/outrelay", "Deployment/outrelay", "Service/outrelay", "ServiceAccount/outrelay"}, c.objects...)
			slices.Sort(want)
			if have := slices.Sorted(maps.Keys(all)); !slices.Equal(have, want) {
				t.Errorf("objects %v, want %v", have, want)
			}

			checkConfiguration(t, all)
			container := all["Deployment/outrelay"].Spec.Template.Spec.Containers[0]
			if container.Ports[0].Name != "http" || container.Ports[0].ContainerPort != c.port || all["Service/outrelay"].Spec.Ports[0].Port != c.port {
				t.Errorf("ports %+v of the container and %+v of the service, want %d", container.Ports, all["Service/outrelay"].Spec.Ports, c.port)
			}
			for _, p := range []probe{container.ReadinessProbe, container.LivenessProbe, container.StartupProbe} {
				if p.HTTPGet.Port != "http" {
					t.Errorf("a probe of the port %s", p.HTTPGet.Port)
				}
			}
			if c.admin != 0 {
				if stays := all["Service/outrelay-admin"].Spec.SessionAffinity; stays != "ClientIP" {
					t.Errorf("the service of operators has the affinity %q: a task of one process is unknown to the others", stays)
				}
				service := all["Service/outrelay-admin"].Spec.Ports
				if len(container.Ports) != 2 || container.Ports[1].ContainerPort != c.admin || len(service) != 1 || service[0].Port != c.admin || service[0].TargetPort != "admin" {
					t.Errorf("ports %+v of the container and %+v of the service of operators, want %d", container.Ports, service, c.admin)
				}
			} else if len(container.Ports) != 1 {
				t.Errorf("ports %+v", container.Ports)
			}
			if policy, ok := all["NetworkPolicy/outrelay"]; ok && (policy.Spec.Ingress[0].Ports[0].Port != c.port || policy.Spec.Ingress[1].Ports[0].Port != c.admin) {
				t.Errorf("the policy permits %+v", policy.Spec.Ingress)
			}
			if monitor, ok := all["ServiceMonitor/outrelay"]; ok && monitor.Spec.Endpoints[0].Port != all["Service/outrelay"].Spec.Ports[0].Name {
				t.Errorf("the monitor scrapes %+v", monitor.Spec.Endpoints)
			}
			if c.image != "" && container.Image != c.image {
				t.Errorf("image %s, want %s", container.Image, c.image)
			}

			// Each secret is a volume of its own.
			for _, secret := range c.mounts {
				volume := ""
				for _, v := range all["Deployment/outrelay"].Spec.Template.Spec.Volumes {
					if v.Secret.SecretName == secret {
						volume = v.Name
					}
				}
				mounted := false
				for _, m := range container.VolumeMounts {
					mounted = mounted || volume != "" && m.Name == volume && m.MountPath == "/run/secrets/outrelay/"+secret
				}
				if !mounted {
					t.Errorf("the secret %s is not in /run/secrets/outrelay/%s: %+v", secret, secret, container.VolumeMounts)
				}
			}
		})
	}
}

// checkConfiguration lets the program check the configuration of a rendered chart.
func checkConfiguration(t *testing.T, all map[string]rendered) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	if err := os.WriteFile(file, []byte(all["ConfigMap/outrelay"].Data["outrelay.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := config.LoadWithoutSecrets(file, nil, nil); err != nil {
		t.Error(err)
	}
}

var (
	valuesBlock  = regexp.MustCompile("(?s)```yaml\n# ([a-z.]+)\n(.*?)```")
	helmTemplate = regexp.MustCompile(`(?m)^ *\$ helm (template [^|>\n]*)`)
)

// The values in the guide are rendered, alone and all together, and its commands of helm work.
func TestChartRendersTheGuide(t *testing.T) {
	t.Parallel()
	guide := string(readRepoFile(t, "docs", "operate", "kubernetes.md"))
	blocks := map[string]string{}
	for _, m := range valuesBlock.FindAllStringSubmatch(guide, -1) {
		blocks[m[1]] = m[2]
	}
	if have, want := slices.Sorted(maps.Keys(blocks)), []string{"alerts", "page", "policy", "values.yaml"}; !slices.Equal(have, want) {
		t.Fatalf("blocks %v, want %v", have, want)
	}

	for _, values := range [][]string{{"values.yaml"}, {"values.yaml", "alerts"}, {"values.yaml", "page"}, {"values.yaml", "policy"}, {"values.yaml", "alerts", "page", "policy"}} {
		var texts []string
		for _, name := range values {
			texts = append(texts, blocks[name])
		}
		text, err := renderChart(t, texts...)
		if err != nil {
			t.Errorf("%v: %v", values, err)
			continue
		}
		checkConfiguration(t, decodeRendered(t, text))
	}

	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(blocks["values.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	commands := helmTemplate.FindAllStringSubmatch(guide, -1)
	if len(commands) < 2 {
		t.Errorf("the guide renders the chart %d times", len(commands))
	}
	for _, m := range commands {
		args := strings.Fields(strings.NewReplacer("deploy/helm/outrelay", repoPath(t, "deploy", "helm", "outrelay"), "-f values.yaml", "-f "+file).Replace(m[1]))
		if _, err := runHelm(t, append(args, "--kube-version", "1.31.0")...); err != nil {
			t.Errorf("helm %s: %v", m[1], err)
		}
	}
}

// serveSecrets serves the part of the API of Kubernetes that Helm reads for a secret, and returns a kubeconfig for it.
func serveSecrets(t *testing.T, data map[string]string) string {
	t.Helper()
	secret, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": "outrelay", "namespace": "events"}, "data": data,
	})
	if err != nil {
		t.Fatal(err)
	}
	pages := map[string]string{
		"/version": `{"major": "1", "minor": "31", "gitVersion": "v1.31.0"}`,
		"/api":     `{"kind": "APIVersions", "versions": ["v1"]}`,
		"/apis":    `{"kind": "APIGroupList", "apiVersion": "v1", "groups": []}`,
		"/api/v1":  `{"kind": "APIResourceList", "groupVersion": "v1", "resources": [{"name": "secrets", "namespaced": true, "kind": "Secret", "verbs": ["get"]}]}`,
		"/api/v1/namespaces/events/secrets/outrelay": string(secret),
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page, ok := pages[r.URL.Path]
		w.Header().Set("Content-Type", "application/json")
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			page = `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}`
		}
		_, _ = io.WriteString(w, page)
	}))
	t.Cleanup(server.Close)

	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {}}]\n" +
		"clusters: [{name: a, cluster: {server: \"" + server.URL + "\"}}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// Where Helm is connected to a cluster, it also rejects a key that a secret does not have.
func TestChartReadsTheKeysOfSecrets(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		data     map[string]string
		rejected bool
	}{
		"key of another name": {map[string]string{"uri": "eA==", "password": "eA=="}, true},
		"key":                 {map[string]string{"mongodb-uri": "eA=="}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chart := repoPath(t, "deploy", "helm", "outrelay")

			_, err := runHelm(t, "template", "outrelay", chart, "-f", filepath.Join(chart, "ci", "minimal-values.yaml"), "--namespace", "events",
				"--kube-version", "1.31.0", "--dry-run=server", "--kubeconfig", serveSecrets(t, c.data))
			rejected := err != nil && strings.Contains(err.Error(), "config.mongodb.uri: the secret outrelay has no key mongodb-uri; it has password, uri")
			if rejected != c.rejected || !c.rejected && err != nil {
				t.Errorf("rejected: %v, %v", rejected, err)
			}
		})
	}
}
