package deploy

import (
	"strings"
	"testing"
)

// Values with which no pod can run are rejected, with the path of the value or a sentence that has the fix.
func TestChartRejectsWrongValues(t *testing.T) {
	t.Parallel()
	minimal := string(chartFile(t, "ci", "minimal-values.yaml"))
	for name, c := range map[string]struct{ values, want string }{
		// The schema of the configuration.
		"unknown key":          {`config: {kafka: {broker: x}}`, `at '/config/kafka': additional properties 'broker' not allowed`},
		"unknown section":      {`config: {kafak: {}}`, `at '/config': additional properties 'kafak' not allowed`},
		"unknown key of a TLS": {`config: {mongodb: {tls: {ca_file: /x}}}`, `at '/config/mongodb/tls': additional properties 'ca_file' not allowed`},
		"enum":                 {`config: {kafka: {sasl: {mechanism: scram}}}`, `config.kafka.sasl.mechanism: found "scram"; expected one of plain, scram-sha-256`},
		"enum of compression":  {`config: {kafka: {compression: zip}}`, `config.kafka.compression: found "zip"; expected one of none, gzip`},
		"duration":             {`config: {lease: {ttl: 5 seconds}}`, `config.lease.ttl: found "5 seconds"; expected a duration such as 250ms, 5s, 24h or 7d`},
		"duration as number":   {`config: {retention: 24}`, `config.retention: found "24"; expected a duration such as 250ms, 5s, 24h or 7d`},
		"size":                 {`config: {limits: {memory: 32 mebibytes}}`, `config.limits.memory: found "32 mebibytes"; expected a size such as 900KiB or 32MiB`},
		"number":               {`config: {slots: many}`, `config.slots: found "many"; expected a whole number`},
		"fraction":             {`config: {slots: 1.5}`, `at '/config/slots': got number, want integer or string`},
		"boolean":              {`config: {mongodb: {indexes: "yes"}}`, `config.mongodb.indexes: found "yes"; expected true or false`},
		"text for a section":   {`config: {kafka: "kafka:9092"}`, `at '/config/kafka': got string, want null or object`},
		"list for a text":      {`config: {watcher: [a]}`, `at '/config/watcher': got array, want string`},
		"port as the address":  {`config: {http: {listen: 9464}}`, `at '/config/http/listen': got number, want string`},
		"watch no collection":  {`config: {watch: [outbox]}`, `config.watch[0]: found "outbox"; expected database.collection`},
		"broker without port":  {`config: {kafka: {brokers: [kafka]}}`, `config.kafka.brokers[0]: found "kafka"; expected host:port`},
		"no connection string": {`config: {mongodb: {uri: mongodb//h}}`, `config.mongodb.uri: found "mongodb//h"; expected mongodb://… or mongodb+srv://…`},
		"no topic":             {`config: {topics: {allow: ["["]}}`, `config.topics.allow[0]: found "["; expected letters, digits, dot, dash, underscore; * and ? are allowed`},
		"key of a rule":        {`config: {topics: {rules: [{typ: x}]}}`, `at '/config/topics/rules/0': additional properties 'typ' not allowed`},

		// The forms and ranges of the configuration.
		"duration as a number":  {`config: {lease: {ttl: 2}}`, `config.lease.ttl: found "2"; expected a duration such as 250ms, 5s, 24h or 7d`},
		"duration in words":     {`config: {retry: {cap: five minutes}}`, `config.retry.cap: found "five minutes"; expected a duration`},
		"no duration":           {`config: {lease: {drain: ""}}`, `config.lease.drain: found ""; expected a duration`},
		"duration out of range": {`config: {lease: {ttl: 10m}}`, `config.lease.ttl: found "10m"; expected between 1s and 5m0s`},
		"retention too short":   {`config: {retention: 30s}`, `config.retention: found "30s"; expected at least 1m0s, or 0 to keep envelopes forever`},
		"size out of range":     {`config: {limits: {record: 1KiB}}`, `config.limits.record: found "1KiB"; expected between 64KiB and 32MiB`},
		"negative size":         {`config: {limits: {envelope: -1}}`, `config.limits.envelope: found "-1"; expected a size such as 900KiB or 32MiB`},
		"number out of range":   {`config: {slots: 0}`, `config.slots: found "0"; expected between 1 and 64`},
		"start":                 {`config: {start: yesterday}`, `config.start: found "yesterday"; expected backlog, now or a time such as`},
		"brokers in one text":   {`config: {kafka: {brokers: "k1:9092, k2"}}`, `config.kafka.brokers: found "k2"; expected host:port`},
		"login is not shown":    {`config: {mongodb: {uri: "mongodb//relay:secret@h"}}`, "config.mongodb.uri: found a text with an @; expected mongodb://"},
		"collector":             {`config: {otel: {endpoint: "collector:4318"}}`, `config.otel.endpoint: found "collector:4318"; expected http://… or https://…`},
		"name of the watcher":   {`config: {watcher: "a b"}`, `config.watcher: found "a b"; expected letters, digits, dot, dash, underscore; at most 100`},
		"prefix of the page":    {`config: {http: {admin: {prefix: ops/}}}`, `config.http.admin.prefix: found "ops/"; expected a path such as /outrelay`},

		// The forms and types of the other values.
		"unknown value":            {`replica: 3`, `additional properties 'replica' not allowed`},
		"former value":             {`existingSecrets: [outrelay]`, `additional properties 'existingSecrets' not allowed`},
		"no configuration":         {`config: null`, `missing property 'config'`},
		"no section":               {`keda: null`, `missing property 'keda'`},
		"no replicas":              {`replicas: 0`, `at '/replicas': minimum: got 0, want 1`},
		"text for a number":        {`replicas: two`, `at '/replicas': got string, want integer`},
		"digest":                   {`image: {digest: latest}`, `image.digest: found "latest"; expected sha256: and 64 hexadecimal digits`},
		"tag with a space":         {`image: {tag: "1.0 "}`, `image.tag: found "1.0 "; expected letters, digits, dot, dash, underscore`},
		"name of a release":        {`fullnameOverride: Out_Relay`, `fullnameOverride: found "Out_Relay"; expected at most 53 lower-case letters`},
		"name of a secret":         {`secrets: [Outrelay]`, `secrets[0]: found "Outrelay"; expected the name of an object`},
		"secret twice":             {`secrets: [outrelay, outrelay]`, `at '/secrets': items at 0 and 1 are equal`},
		"number as a label":        {`podLabels: {team: 7}`, `at '/podLabels/team': got number, want string`},
		"seconds of metrics":       {`serviceMonitor: {interval: "15"}`, `serviceMonitor.interval: found "15"; expected a duration such as 15s`},
		"share of a budget":        {`podDisruptionBudget: {maxUnavailable: half}`, `podDisruptionBudget.maxUnavailable: found "half"; expected a number such as 1, or a share such as 50%`},
		"address without a scheme": {`keda: {prometheus: "prometheus:9090"}`, `keda.prometheus: found "prometheus:9090"; expected an address such as http://`},
		"relative path":            {`injectedPaths: [certs]`, `injectedPaths[0]: found "certs"; expected a path that begins with /`},
		"former policy":            {`networkPolicy: {kafka: {namespace: kafka, port: 9092}}`, `at '/networkPolicy': additional properties 'kafka' not allowed`},

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

		// Values of the configuration that contradict each other, or lack a part.
		"renewal too rare":        {`config: {lease: {ttl: 2s, renew: 1s}}`, "config.lease.renew: found 1s; expected at most a third of config.lease.ttl, 2s"},
		"cap below the base":      {`config: {retry: {base: 10s, cap: 1s}}`, "config.retry.cap: found 1s; expected at least config.retry.base, 10s"},
		"memory of many slots":    {`config: {slots: 64}`, "config.limits.memory: found 32MiB; expected at least 1MiB for each of config.slots, 64"},
		"envelope above a record": {`config: {limits: {record: 64KiB}}`, "config.limits.envelope: found 900KiB; expected at most config.limits.record, 64KiB"},
		"login without password":  {`config: {kafka: {sasl: {mechanism: plain, username: u}}}`, "config.kafka.sasl.password is required for the mechanism plain"},
		"login without mechanism": {`config: {kafka: {sasl: {username: u}}}`, "config.kafka.sasl.mechanism is required"},
		"login without region":    {`config: {kafka: {sasl: {mechanism: aws_msk_iam}}}`, "config.kafka.sasl.region is required for the mechanism aws_msk_iam"},
		"token of two sources": {
			`config: {kafka: {sasl: {mechanism: oauthbearer, token: {file: /vault/secrets/t, command: [/token]}}}}`,
			"config.kafka.sasl.token: found 2 sources; set exactly one of file, command and oidc",
		},
		"certificate without key": {`config: {kafka: {tls: {cert: /run/secrets/outrelay/outrelay/tls.crt}}}`, "config.kafka.tls.key is required"},
		"key without certificate": {`config: {mongodb: {tls: {key: /run/secrets/outrelay/outrelay/tls.key}}}`, "config.mongodb.tls.cert is required"},
		"page open to all":        {`config: {http: {admin: {listen: ":9465", anonymous: operator}}}`, "config.http.admin.anonymous: found operator; only an address that is local to the pod"},
		"one token for two roles": {
			`config: {http: {admin: {listen: ":9465", token: "${file:/run/secrets/outrelay/outrelay/t}", viewer_token: "${file:/run/secrets/outrelay/outrelay/t}"}}}`,
			"config.http.admin.viewer_token: it needs another key than token",
		},
		"unknown task":       {`config: {tasks: "relay, cleanr"}`, `config.tasks: found "cleanr"; expected one of relay, cleaner, admin`},
		"no task":            {`config: {tasks: []}`, "config.tasks: the pods would do nothing; expected relay, or admin with config.http.admin"},
		"empty name":         {`config: {watch: [""]}`, `config.watch[0]: found ""; expected database.collection`},
		"port of a broker":   {`config: {kafka: {brokers: ["k:99999"]}}`, `config.kafka.brokers[0]: found "k:99999"; expected host:port`},
		"unknown reference":  {`config: {watcher: "${evn:POD_NAME}"}`, `config.watcher: found "${evn:POD_NAME}"; expected ${env:NAME} or ${file:/path}`},
		"unclosed reference": {`config: {watcher: "${env:POD_NAME"}`, `config.watcher: found "${env:POD_NAME"; expected ${env:NAME}`},
		"file without a key": {`config: {mongodb: {uri: "${file:/run/secrets/outrelay/outrelay/}"}}`, "each secret has a directory: expected /run/secrets/outrelay/SECRET/KEY"},

		// Values that the API server rejects, or with which it starts no pod.
		"amount of memory":       {`resources: {limits: {memory: 256MB}}`, `resources.limits.memory: found "256MB"; expected an amount such as 250m of cpu or 256Mi of memory`},
		"thousandths of a byte":  {`resources: {limits: {memory: 256m}}`, "resources.limits.memory: found 256m; Kubernetes would kill the process"},
		"amount of cpu":          {`resources: {requests: {cpu: quarter}}`, `resources.requests.cpu: found "quarter"; expected an amount`},
		"cpu below its request":  {`resources: {requests: {cpu: 2}, limits: {cpu: 500m}}`, "resources.requests.cpu: found 2; Kubernetes rejects a request above resources.limits.cpu (500m)"},
		"unknown resource":       {`resources: {limits: {memroy: 256Mi}}`, "resources.limits.memroy: Kubernetes has no such resource"},
		"registry with a scheme": {`image: {repository: "https://registry.example.com/outrelay"}`, "image.repository: found \"https://registry.example.com/outrelay\"; expected a name such as"},
		"upper case image":       {`image: {repository: "registry.example.com/Outrelay"}`, "lower case, and without https://"},
		"name with a digit":      {`fullnameOverride: 1relay`, "the name of the services, 1relay, does not begin with a letter; set fullnameOverride"},
		"number of a node":       {`nodeSelector: {zone: 1}`, `at '/nodeSelector/zone': got number, want string`},
		"key of a node":          {`nodeSelector: {"bad key!": x}`, `nodeSelector: found "bad key!"; expected a key such as team or example.com/team`},
		"value of a label":       {`podLabels: {team: "a b"}`, `podLabels.team: found "a b"; expected at most 63 letters`},
		"key of an annotation":   {`podAnnotations: {"a b": x}`, `podAnnotations: found "a b"; expected a key`},
		"toleration":             {`tolerations: [{key: a, operator: Is}]`, `at '/tolerations/0/operator': value must be one of 'Exists', 'Equal'`},
		"affinity":               {`affinity: {nodeAffinty: {}}`, `at '/affinity': additional properties 'nodeAffinty' not allowed`},
		"priority":               {`priorityClassName: High Prio`, `priorityClassName: found "High Prio"; expected the name of an object`},
		"name of an account":     {`serviceAccount: {name: Out Relay}`, `serviceAccount.name: found "Out Relay"`},
		"secret of the registry": {`imagePullSecrets: [{name: Bad Name}]`, `imagePullSecrets[0].name: found "Bad Name"`},
		"name of dots":           {`secrets: [outrelay, a..b]`, `secrets[1]: found "a..b"; expected the name of an object`},
		"two values":             {`extraEnv: [{name: A, value: x, valueFrom: {secretKeyRef: {name: s, key: k}}}]`, "extraEnv: A has value and valueFrom; keep one of them"},
		"variable twice":         {`extraEnv: [{name: A, value: x}, {name: A, value: z}]`, "extraEnv: found A twice"},
		"name of a variable":     {`extraEnv: [{name: A B, value: x}]`, `extraEnv[0].name: found "A B"`},
		"number as a variable":   {`extraEnv: [{name: A, value: 5}]`, `at '/extraEnv/0/value': got number, want string`},
		"two sources":            {`extraVolumes: [{name: x, emptyDir: {}, configMap: {name: a}}]`, "extraVolumes: x has several sources (configMap, emptyDir)"},
		"volume twice":           {`extraVolumes: [{name: x, emptyDir: {}}, {name: x, emptyDir: {}}]`, "extraVolumes: found x twice"},
		"path twice": {
			`{extraVolumes: [{name: x, emptyDir: {}}], extraVolumeMounts: [{name: x, mountPath: /a}, {name: x, mountPath: /a}]}`, "extraVolumeMounts: found the path /a twice",
		},
		"mount over the program": {`{extraVolumes: [{name: x, emptyDir: {}}], extraVolumeMounts: [{name: x, mountPath: /}]}`, "extraVolumeMounts: found the path /, which hides the program"},
		"share above all":        {`podDisruptionBudget: {enabled: true, maxUnavailable: "200%"}`, `podDisruptionBudget.maxUnavailable: found "200%"; expected a number such as 1`},
		"share of all":           {`podDisruptionBudget: {enabled: true, maxUnavailable: "60%"}`, "podDisruptionBudget.maxUnavailable: found 60% of 2 processes; the budget protects none"},
		"peer":                   {`networkPolicy: {metricsFrom: [{podSelectr: {}}]}`, `at '/networkPolicy/metricsFrom/0': additional properties 'podSelectr' not allowed`},

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

// TestChartReportsAWrongValueOnce: a value that is no duration or size, or out of its range, is not compared with other values.
func TestChartReportsAWrongValueOnce(t *testing.T) {
	t.Parallel()
	minimal := string(chartFile(t, "ci", "minimal-values.yaml"))
	for name, values := range map[string]string{
		"lease without a unit": `config: {lease: {ttl: 5}}`,
		"lease too long":       `config: {lease: {ttl: 10m}}`,
		"lease too short":      `config: {lease: {ttl: 500ms}}`,
		"renewal":              `config: {lease: {renew: 2m}}`,
		"drain":                `config: {lease: {drain: 2h}}`,
		"cap in words":         `config: {retry: {cap: five}}`,
		"cap too short":        `config: {retry: {cap: 1ms}}`,
		"memory of slots":      `config: {slots: 2, limits: {memory: 1KiB}}`,
		"record":               `config: {limits: {record: 1KiB}}`,
		"memory":               `resources: {limits: {memory: 512 MB}}`,
		"cpu":                  `resources: {limits: {cpu: 1 core}, requests: {cpu: 100m}}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := renderChart(t, minimal, values)
			if err == nil {
				t.Fatal("it is accepted")
			}

			if n := strings.Count(err.Error(), "\n  "); n != 1 {
				t.Errorf("%d lines, want 1: %v", n, err)
			}
		})
	}

	// A reference has no value yet.
	if _, err := renderChart(t, minimal, `{config: {lease: {ttl: "${env:TTL}"}, retry: {cap: "${env:CAP}"}}, extraEnv: [{name: TTL, value: 9s}, {name: CAP, value: 1m}]}`); err != nil {
		t.Errorf("references: %v", err)
	}
}
