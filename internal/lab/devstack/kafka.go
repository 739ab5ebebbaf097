package devstack

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// Listener names a listener of the brokers.
type Listener string

// The listeners. All except Plain exist only with the listed options.
const (
	Plain   Listener = "PLAINTEXT"
	SASL    Listener = "SASL_PLAINTEXT" // KafkaOptions.Users
	TLS     Listener = "SSL"            // KafkaOptions.TLS
	SASLTLS Listener = "SASL_SSL"       // both
)

const controllerListener Listener = "CONTROLLER"

// listeners returns the listeners that the options require.
func (k KafkaOptions) listeners() []Listener {
	ls := []Listener{Plain, controllerListener}
	if len(k.Users) > 0 {
		ls = append(ls, SASL)
	}
	if k.TLS {
		ls = append(ls, TLS)
		if len(k.Users) > 0 {
			ls = append(ls, SASLTLS)
		}
	}
	return ls
}

// node is one broker with the ports of its listeners.
type node struct {
	id    int
	ports map[Listener]int
	data  string
}

// startBrokers formats the data of the brokers and starts them. Each broker is also a controller. startBrokers
// blocks until each broker lists all of them.
func (s *Stack) startBrokers(ctx context.Context, program kafkaProgram, options Options) error {
	nodes, err := s.planNodes(options)
	if err != nil {
		return err
	}

	cluster := newClusterID()
	for _, n := range nodes {
		member := &Member{
			name: "kafka-" + strconv.Itoa(n.id), id: n.id, addr: loopback(n.ports[Plain]), dir: s.dir,
			ports: slices.Collect(maps.Values(n.ports)), listeners: n.ports,
		}

		member.check = func(ctx context.Context) error { return checkBroker(ctx, member.addr, member.id, 1) }
		if program.image != "" {
			member.launch = s.containerLaunch(member, program.image, kafkaEnv(brokerProps(n, nodes, options, s.tls, ""), cluster), nil)
		} else if member.launch, err = s.brokerLaunch(n, nodes, program, options); err != nil {
			return err
		}

		s.brokers = append(s.brokers, member)
	}

	if program.image == "" {
		if err := format(ctx, program, options.Kafka, cluster, nodes, s.dir); err != nil {
			return fmt.Errorf("formatting Kafka's data: %w", err)
		}
	}

	// The brokers need each other to elect a controller, so all start before one is awaited.
	for _, m := range s.brokers {
		if err := m.Start(); err != nil {
			return err
		}
	}

	var all errgroup.Group
	for _, m := range s.brokers {
		all.Go(func() error {
			return m.awaitReady(ctx, func(ctx context.Context) error { return checkBroker(ctx, m.addr, m.id, len(nodes)) })
		})
	}
	return all.Wait()
}

// planNodes chooses the ports and the data directories of the brokers.
func (s *Stack) planNodes(options Options) ([]node, error) {
	ls := options.Kafka.listeners()
	ports, err := freePorts(options.Brokers * len(ls))
	if err != nil {
		return nil, err
	}

	nodes := make([]node, options.Brokers)
	for i := range nodes {
		nodes[i] = node{id: i + 1, ports: map[Listener]int{}, data: filepath.Join(s.dir, "kafka-"+strconv.Itoa(i+1))}

		for j, l := range ls {
			nodes[i].ports[l] = ports[i*len(ls)+j]
		}
	}
	return nodes, nil
}

// brokerLaunch writes the properties of the broker and returns the function that starts it.
func (s *Stack) brokerLaunch(
	n node, nodes []node, program kafkaProgram, options Options,
) (func(*os.File) (instance, error), error) {
	if err := os.Mkdir(n.data, 0o755); err != nil {
		return nil, err
	}

	props := n.data + ".properties"
	if err := writeProps(props, brokerProps(n, nodes, options, s.tls, n.data)); err != nil {
		return nil, err
	}

	args := javaArgs(program, tuning(options.Quick), options.Kafka.HeapMB, "kafka.Kafka", props)
	return func(log *os.File) (instance, error) { return startProcess(s.guard, s.dir, log, program.java, args) }, nil
}

// tuning is the purpose for which a JVM is tuned.
type tuning bool

const (
	likeProduction tuning = false
	quickStart     tuning = true
)

// javaArgs returns the arguments of a JVM that runs a program of Kafka.
func javaArgs(program kafkaProgram, tuning tuning, heapMB int, class string, args ...string) []string {
	jvm := []string{
		fmt.Sprintf("-Xmx%dm", heapMB), "-XX:+ExitOnOutOfMemoryError", "-Xlog:cds=off", "-Xlog:cds+dynamic=off",
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true",
	}

	if tuning == quickStart {
		jvm = append(jvm, "-Xms64m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
	} else {
		// As in production: a heap of constant size, and short pauses.
		jvm = append(jvm, fmt.Sprintf("-Xms%dm", heapMB), "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
			"-XX:InitiatingHeapOccupancyPercent=35")
	}

	if program.prep != "" {
		jvm = append(jvm, "-Xshare:auto", "-XX:SharedArchiveFile="+filepath.Join(program.prep, archiveFile))
	}

	return slices.Concat(jvm, []string{"-cp", filepath.Join(program.libs, "*"), class}, args)
}

// brokerProps returns the properties of a node that is broker and controller. data is empty for a container. Its
// image chooses the data directory, and clients connect to published ports.
func brokerProps(n node, nodes []node, options Options, tls *authority, data string) map[string]string {
	var voters, listen, advertise []string
	for _, v := range nodes {
		voters = append(voters, fmt.Sprintf("%d@%s", v.id, loopback(v.ports[controllerListener])))
	}

	host := "127.0.0.1"
	if data == "" {
		host = "0.0.0.0"
	}

	for _, l := range options.Kafka.listeners() {
		listen = append(listen, fmt.Sprintf("%s://%s:%d", l, host, n.ports[l]))
		if l != controllerListener {
			advertise = append(advertise, fmt.Sprintf("%s://%s", l, loopback(n.ports[l])))
		}
	}

	// The cluster detects a dead broker when its session ends. A broker that restarts after SIGKILL waits for the
	// end of its old session.
	copies, insync, session := "1", "1", "3000"
	if len(nodes) == 3 {
		copies, insync, session = "3", "2", "6000"
	}

	props := map[string]string{
		"process.roles":              "broker,controller",
		"node.id":                    strconv.Itoa(n.id),
		"controller.quorum.voters":   strings.Join(voters, ","),
		"controller.listener.names":  string(controllerListener),
		"inter.broker.listener.name": string(Plain),
		"listeners":                  strings.Join(listen, ","),
		"advertised.listeners":       strings.Join(advertise, ","),
		"listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL," +
			"SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL",

		"auto.create.topics.enable":        "false",
		"num.partitions":                   "6",
		"default.replication.factor":       copies,
		"min.insync.replicas":              insync,
		"offsets.topic.replication.factor": copies,
		"offsets.topic.num.partitions":     "4",
		"group.initial.rebalance.delay.ms": "0",
		// The default allocates 128 MB of the heap at the start.
		"log.cleaner.dedupe.buffer.size":                   "4194304",
		"transaction.state.log.num.partitions":             "4",
		"transaction.state.log.replication.factor":         copies,
		"transaction.state.log.min.isr":                    insync,
		"share.coordinator.state.topic.replication.factor": copies,
		"share.coordinator.state.topic.min.isr":            insync,

		"broker.session.timeout.ms":             session,
		"broker.heartbeat.interval.ms":          "500",
		"controller.quorum.election.timeout.ms": "500",
		"controller.quorum.fetch.timeout.ms":    "1000",
	}

	if data != "" {
		props["log.dirs"] = data
	}
	securityProps(props, options.Kafka, tls)
	maps.Copy(props, options.Kafka.Props)
	return props
}

func writeProps(path string, props map[string]string) error {
	var builder strings.Builder
	for _, k := range sortedKeys(props) {
		// A backslash starts an escape in this format.
		fmt.Fprintf(&builder, "%s=%s\n", k, strings.ReplaceAll(props[k], `\`, `\\`))
	}
	return os.WriteFile(path, []byte(builder.String()), 0o600)
}

// newClusterID returns 16 random bytes in Kafka's format for ids. It never returns an id with a leading dash,
// because Kafka's tools would parse it as an option.
func newClusterID() string {
	for {
		var random [16]byte
		_, _ = rand.Read(random[:])
		if id := base64.RawURLEncoding.EncodeToString(random[:]); id[0] != '-' {
			return id
		}
	}
}

// useKafka uses the brokers named by the environment. At least one of them must respond.
func (s *Stack) useKafka(ctx context.Context, list string) error {
	var silent []error
	for i, addr := range strings.Split(list, ",") {
		member := &Member{name: "kafka-" + strconv.Itoa(i+1), id: i + 1, addr: strings.TrimSpace(addr)}
		member.check = func(ctx context.Context) error { return checkBroker(ctx, member.addr, 0, 1) }
		s.brokers = append(s.brokers, member)

		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		if err := member.check(try); err != nil {
			silent = append(silent, fmt.Errorf("%s names %s, which does not respond: %w", EnvKafka, member.addr, err))
		}
		cancel()
	}

	if len(silent) < len(s.brokers) {
		return nil
	}
	return errors.Join(silent...)
}

// Brokers returns the addresses of the plain listeners.
func (s *Stack) Brokers() []string { return memberAddrs(s.brokers) }

// BrokersOn returns the addresses of a listener. It returns an error if the options do not include it.
func (s *Stack) BrokersOn(listener Listener) ([]string, error) {
	var out []string
	for _, m := range s.brokers {
		port, ok := m.listeners[listener]
		if !ok {
			return nil, fmt.Errorf("%s has no listener %s: enable it in Options.Kafka", m.name, listener)
		}
		out = append(out, loopback(port))
	}

	if out == nil {
		return nil, errors.New("the stack has no brokers")
	}
	return out, nil
}

func memberAddrs(members []*Member) []string {
	out := make([]string, 0, len(members))
	for _, m := range members {
		out = append(out, m.addr)
	}
	return out
}

func sortedKeys(values map[string]string) []string { return slices.Sorted(maps.Keys(values)) }
