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

// Values with which no pod can run are rejected, with the path of the value or a sentence that has the fix.
func TestChartRejectsWrongValues(t *testing.T) {
	t.Parallel()
	minimal := string(chartFile(t, "ci", "minimal-values.yaml"))
	for name, c := range map[string]struct{ values, want string }{
		// The schema of the configuration.
		"unknown key":          {`config: {kafka: {broker: x}}`, `at '/config/kafka': additional properties 'broker' not allowed`},
		"unknown section":      {`config: {kafak: {}}`, `at '/config': additional properties 'kafak' not allowed`},
		"unknown key of a TLS": {`config: {mongodb: {tls: {ca_file: /x}}}`, `at '/config/mongodb/tls': additional properties 'ca_file' not allowed`},
		"enum":                 {`config: {kafka: {sasl: {mechanism: scram}}}`, `at '/config/kafka/sasl/mechanism': value must be one of 'plain', 'scram-sha-256'`},
		"enum of compression":  {`config: {kafka: {compression: zip}}`, `at '/config/kafka/compression': value must be one of 'none', 'gzip'`},
		"duration":             {`config: {lease: {ttl: 5 seconds}}`, `at '/config/lease/ttl': '5 seconds' does not match pattern`},
		"duration as number":   {`config: {retention: 24}`, `at '/config/retention'`},
		"size":                 {`config: {limits: {memory: 32 mebibytes}}`, `at '/config/limits/memory': '32 mebibytes' does not match pattern`},
		"number":               {`config: {slots: many}`, `at '/config/slots': got string, want integer`},
		"fraction":             {`config: {slots: 1.5}`, `at '/config/slots': got number, want integer`},
		"boolean":              {`config: {mongodb: {indexes: "yes"}}`, `at '/config/mongodb/indexes': got string, want boolean`},
		"text for a section":   {`config: {kafka: "kafka:9092"}`, `at '/config/kafka': got string, want null or object`},
		"list for a text":      {`config: {watcher: [a]}`, `at '/config/watcher': got array, want string`},
		"port as the address":  {`config: {http: {listen: 9464}}`, `at '/config/http/listen': got number, want string`},
		"watch no collection":  {`config: {watch: [outbox]}`, `at '/config/watch/0': 'outbox' does not match pattern`},
		"broker without port":  {`config: {kafka: {brokers: [kafka]}}`, `at '/config/kafka/brokers/0': 'kafka' does not match pattern`},
		"no connection string": {`config: {mongodb: {uri: mongodb//h}}`, `at '/config/mongodb/uri': 'mongodb//h' does not match pattern`},
		"no topic":             {`config: {topics: {allow: ["["]}}`, `at '/config/topics/allow/0': '[' does not match pattern`},
		"key of a rule":        {`config: {topics: {rules: [{typ: x}]}}`, `at '/config/topics/rules/0': additional properties 'typ' not allowed`},

		// The schema of the other values.
		"unknown value":      {`replica: 3`, `additional properties 'replica' not allowed`},
		"former value":       {`existingSecrets: [outrelay]`, `additional properties 'existingSecrets' not allowed`},
		"no configuration":   {`config: null`, `missing property 'config'`},
		"no section":         {`keda: null`, `missing property 'keda'`},
		"no replicas":        {`replicas: 0`, `at '/replicas': minimum: got 0, want 1`},
		"text for a number":  {`replicas: two`, `at '/replicas': got string, want integer`},
		"digest":             {`image: {digest: latest}`, `at '/image/digest'`},
		"tag with a space":   {`image: {tag: "1.0 "}`, `at '/image/tag'`},
		"name of a release":  {`fullnameOverride: Out_Relay`, `at '/fullnameOverride'`},
		"name of a secret":   {`secrets: [Outrelay]`, `at '/secrets/0'`},
		"secret twice":       {`secrets: [outrelay, outrelay]`, `at '/secrets': items at 0 and 1 are equal`},
		"number as a label":  {`podLabels: {team: 7}`, `at '/podLabels/team': got number, want string`},
		"seconds of metrics": {`serviceMonitor: {interval: "15"}`, `at '/serviceMonitor/interval'`},
		"former policy":      {`networkPolicy: {kafka: {namespace: kafka, port: 9092}}`, `at '/networkPolicy': additional properties 'kafka' not allowed`},

		// The image.
		"no repository":     {`image: {repository: ""}`, "image.repository is required: there is no released image yet"},
		"no tag":            {`image: {tag: ""}`, "image.tag is required, or image.digest"},
		"repository:tag":    {`image: {repository: "registry.example.com:5000/outrelay:1.0"}`, `image.repository: found "registry.example.com:5000/outrelay:1.0"; expected a name without tag`},
		"repository@digest": {`image: {repository: "registry.example.com/outrelay@sha256:00"}`, "image.repository: found"},

		// Required keys.
		"no brokers":      {`config: {kafka: {brokers: []}}`, "config.kafka.brokers is required"},
		"no address":      {`config: {mongodb: {uri: ""}}`, "config.mongodb.uri is required"},
		"no MongoDB":      {`config: {mongodb: null}`, "config.mongodb.uri is required"},
		"node of all":     {`config: {node: relay-1}`, "config.node: remove it; the chart sets it for each pod"},
		"address of all":  {`config: {address: "relay:9464"}`, "config.address: remove it"},
		"password in URI": {`config: {mongodb: {uri: "mongodb://relay:secret@mongodb:27017"}}`, "config.mongodb.uri: a password in a ConfigMap is readable for many"},
		"literal password": {
			`config: {kafka: {sasl: {mechanism: plain, username: relay, password: secret}}}`,
			"config.kafka.sasl.password: a password in a ConfigMap is readable for many",
		},
		"literal token": {
			`config: {http: {admin: {token: abcdefghijklmnop}}}`, "config.http.admin.token: a password in a ConfigMap is readable for many",
		},

		// The listeners.
		"loopback":           {`config: {http: {listen: "127.0.0.1:9464"}}`, `config.http.listen: found "127.0.0.1:9464"; the probes and Prometheus cannot reach an address that is local to the pod; set 0.0.0.0:9464`},
		"localhost":          {`config: {http: {listen: "localhost:8080"}}`, `set 0.0.0.0:8080`},
		"IPv6 loopback":      {`config: {http: {listen: "[::1]:8080"}}`, `cannot reach an address that is local to the pod`},
		"the default":        {`config: {http: null}`, `config.http.listen: found "127.0.0.1:9464"`},
		"off":                {`config: {http: {listen: "off"}}`, "config.http.listen is off: the probes of the pods need it"},
		"another host":       {`config: {http: {listen: "10.0.0.7:9464"}}`, "expected all addresses of the pod, such as 0.0.0.0:9464"},
		"no port":            {`config: {http: {listen: "0.0.0.0"}}`, `config.http.listen: found "0.0.0.0"; expected host:port`},
		"low port":           {`config: {http: {listen: ":80"}}`, "expected a port between 1024 and 65535"},
		"high port":          {`config: {http: {listen: ":70000"}}`, "expected a port between 1024 and 65535"},
		"port by reference":  {`config: {http: {listen: "${env:POD_IP}:9464"}}`, "write the address itself"},
		"page without admin": {`admin: {enabled: true}`, "admin.enabled needs config.http.admin: without it, no page and no API is served"},
		"page on loopback": {
			`{admin: {enabled: true}, config: {http: {admin: {anonymous: viewer}}}}`,
			`config.http.admin.listen: found "127.0.0.1:9465"; the service of admin.enabled cannot reach`,
		},
		"page without its task": {
			`{admin: {enabled: true}, config: {tasks: [relay, cleaner], http: {admin: {listen: ":9465", proxy: {header: X-User, from: [10.0.0.0/8]}}}}}`,
			"admin.enabled needs the task admin in config.tasks",
		},
		"page on the same port": {
			`config: {http: {admin: {listen: ":9464", proxy: {header: X-User, from: [10.0.0.0/8]}}}}`,
			"config.http.admin.listen: found \":9464\"; it needs another port than config.http.listen",
		},
		"page without login": {`config: {http: {admin: {listen: ":9465"}}}`, "config.http.admin: no client can log in"},

		// Files and variables.
		"key without its secret": {
			`config: {mongodb: {uri: "${file:/run/secrets/outrelay/mongodb-uri}"}}`,
			"config.mongodb.uri: found the file /run/secrets/outrelay/mongodb-uri; each secret has a directory: expected /run/secrets/outrelay/SECRET/KEY",
		},
		"secret that is not mounted": {
			`config: {kafka: {tls: {ca: /run/secrets/outrelay/kafka-ca/ca.crt}}}`,
			"config.kafka.tls.ca: found the file /run/secrets/outrelay/kafka-ca/ca.crt, but secrets does not list the secret kafka-ca",
		},
		"no secrets": {`secrets: []`, "config.mongodb.uri: found the file /run/secrets/outrelay/outrelay/mongodb-uri, but secrets does not list the secret outrelay"},
		"file of no volume": {
			`config: {mongodb: {tls: {ca: /certs/ca.crt}}}`, "config.mongodb.tls.ca: the pod has no file /certs/ca.crt",
		},
		"token file without its volume": {
			`config: {kafka: {sasl: {mechanism: oauthbearer, token: {file: /tokens/kafka}}}}`, "config.kafka.sasl.token.file: the pod has no file /tokens/kafka",
		},
		"token of Kubernetes": {
			`config: {kafka: {sasl: {mechanism: oauthbearer, token: {file: /var/run/secrets/kubernetes.io/serviceaccount/token}}}}`,
			"needs serviceAccount.automountToken",
		},
		"variable that does not exist": {`config: {watcher: "${env:REGION}"}`, "config.watcher: extraEnv has no variable REGION"},
		"reference in a list":          {`config: {kafka: {brokers: ["${env:BROKER}"]}}`, "config.kafka.brokers[0]: extraEnv has no variable BROKER"},
		"key as a variable":            {`extraEnv: [{name: OUTRELAY_HTTP_LISTEN, value: ":8080"}]`, "extraEnv: found OUTRELAY_HTTP_LISTEN; set its key in config"},
		"variable of the chart":        {`extraEnv: [{name: POD_IP, value: x}]`, "extraEnv: found POD_IP; remove it"},
		"mount without a volume":       {`extraVolumeMounts: [{name: certs, mountPath: /certs}]`, "extraVolumeMounts: extraVolumes has no volume certs"},
		"mount over the configuration": {
			`{extraVolumes: [{name: x, emptyDir: {}}], extraVolumeMounts: [{name: x, mountPath: /etc/outrelay}]}`,
			"extraVolumeMounts: found the path /etc/outrelay, which the chart uses",
		},
		"volume of the chart": {`extraVolumes: [{name: config, emptyDir: {}}]`, "extraVolumes: the chart has a volume config"},

		// Labels, accounts, times and memory.
		"label of the selector":    {`podLabels: {app.kubernetes.io/name: relay}`, "podLabels: found app.kubernetes.io/name; remove it"},
		"annotation of the chart":  {`podAnnotations: {checksum/config: x}`, "podAnnotations: found checksum/config; remove it"},
		"annotation of no account": {`serviceAccount: {create: false, annotations: {a: b}}`, "serviceAccount.annotations have no effect without serviceAccount.create"},
		"drain until killed":       {`config: {lease: {drain: 1m}}`, "terminationGracePeriodSeconds: found 30; Kubernetes would kill the process while it stops; expected more than config.lease.drain and config.lease.ttl together, 65 s"},
		"grace as short as both":   {`terminationGracePeriodSeconds: 15`, "terminationGracePeriodSeconds: found 15"},
		"memory of envelopes":      {`config: {limits: {memory: 256MiB}}`, "resources.limits.memory: found 256Mi; Kubernetes would kill the process at its usual size; expected at least 1.5 times config.limits.memory (256MiB) and 60Mi"},
		"memory of the pod":        {`resources: {limits: {memory: 107Mi}}`, "resources.limits.memory: found 107Mi"},
		"memory below its request": {`resources: {requests: {memory: 300Mi}}`, "resources.requests.memory: found 300Mi; Kubernetes rejects a request above resources.limits.memory (256Mi)"},

		// Optional objects.
		"budget of none":       {`podDisruptionBudget: {enabled: true, maxUnavailable: 0}`, "podDisruptionBudget.maxUnavailable: found 0; no node with a pod could be drained"},
		"budget of all":        {`podDisruptionBudget: {enabled: true, maxUnavailable: 2}`, "podDisruptionBudget.maxUnavailable: found 2 of 2 processes; the budget protects none"},
		"budget of one":        {`{replicas: 1, podDisruptionBudget: {enabled: true}}`, "found 1 of 1 processes"},
		"policy without peers": {`networkPolicy: {enabled: true, egress: [{}]}`, "networkPolicy.metricsFrom is required"},
		"policy without rules": {`networkPolicy: {enabled: true, metricsFrom: [{podSelector: {}}]}`, "networkPolicy.egress is required"},
		"policy without operators": {
			`{admin: {enabled: true}, networkPolicy: {enabled: true, metricsFrom: [{podSelector: {}}], egress: [{}]}, config: {http: {admin: {listen: ":9465", proxy: {header: X-User, from: [10.0.0.0/8]}}}}}`,
			"networkPolicy.adminFrom is required with admin.enabled",
		},
		"scaling of one slot":        {`keda: {enabled: true, prometheus: "http://prometheus:9090"}`, "keda.maxReplicas: found 4; expected at most config.slots, 1"},
		"scaling above the slots":    {`{config: {slots: 4}, keda: {enabled: true, maxReplicas: 8, prometheus: "http://prometheus:9090"}}`, "keda.maxReplicas: found 8; expected at most config.slots, 4"},
		"scaling down to more":       {`{config: {slots: 8}, keda: {enabled: true, minReplicas: 6, prometheus: "http://prometheus:9090"}}`, "keda.minReplicas: found 6; expected at most keda.maxReplicas, 4"},
		"scaling without Prometheus": {`{config: {slots: 4}, keda: {enabled: true}}`, "keda.prometheus is required"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := renderChart(t, minimal, c.values)
			if err == nil {
				t.Fatalf("%s is accepted", c.values)
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: no %q in\n%v", c.values, c.want, err)
			}
		})
	}
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
		Ports []struct {
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
