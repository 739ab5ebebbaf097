package devstack

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// The files that prepareKafka creates for later starts: the first records of a new cluster, and an archive of the
// loaded classes. The archive halves the time and the processor time of a broker's start.
const (
	checkpointFile = "bootstrap.checkpoint"
	archiveFile    = "classes.jsa"
)

// format creates the data of the nodes. The first records of a cluster are equal for all its nodes. Without SCRAM
// users they are also equal for all clusters of a version. So the tool runs at most once, and not at all after
// prepareKafka.
func format(ctx context.Context, program kafkaProgram, options KafkaOptions, cluster string, nodes []node, dir string) error {
	checkpoint := filepath.Join(program.prep, checkpointFile)
	first := 0
	// Passwords of SCRAM users are records of the first node, made by the tool.
	if program.prep == "" || len(options.Users) > 0 {
		if err := runFormat(ctx, program, options, cluster, nodes[0].data+".properties", dir); err != nil {
			return err
		}
		checkpoint, first = firstRecords(program.version, nodes[0].data), 1
	}

	records, err := os.ReadFile(checkpoint)
	if err != nil {
		return err
	}

	for _, n := range nodes[first:] {
		copied := firstRecords(program.version, n.data)
		meta := fmt.Sprintf("version=1\ncluster.id=%s\nnode.id=%d\ndirectory.id=%s\n", cluster, n.id, newClusterID())
		err := errors.Join(
			os.MkdirAll(filepath.Dir(copied), 0o755),
			os.WriteFile(copied, records, 0o644),
			os.WriteFile(filepath.Join(n.data, "meta.properties"), []byte(meta), 0o644))
		if err != nil {
			return err
		}
	}
	return nil
}

// firstRecords returns the file with the first records of a cluster in the data of a node. From Kafka 4.4 on, it is a snapshot of the
// metadata log.
func firstRecords(version, data string) string {
	var major, minor int
	_, _ = fmt.Sscanf(version, "%d.%d", &major, &minor)
	if major > 4 || major == 4 && minor >= 4 {
		return filepath.Join(data, "__cluster_metadata-0", "00000000000000000000-0000000000.checkpoint")
	}
	return filepath.Join(data, checkpointFile)
}

// runFormat runs the format tool of Kafka for one node.
func runFormat(ctx context.Context, program kafkaProgram, options KafkaOptions, cluster, props, dir string) error {
	args := []string{"format", "-t", cluster, "-c", props}
	for _, u := range options.Users {
		for _, m := range sasl.With(sasl.Password) {
			if !m.Clear {
				args = append(args, "--add-scram", fmt.Sprintf("%s=[name=%s,password=%s]", m.Listener, u.Name, u.Password))
			}
		}
	}

	cmd := interruptible(ctx, program.java, javaArgs(program, quickStart, 128, "kafka.tools.StorageTool", args...)...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return addLastLine(err, string(out))
	}
	return nil
}

// prepareKafka starts and stops a broker once, and keeps the files that make every later start fast. A start also
// works without them, only slower. So the caller reports the error as progress, and Start does not return it.
func prepareKafka(ctx context.Context, cache cache, program kafkaProgram, report func(Progress)) (prep string, err error) {
	entry := "kafka-" + program.version + "-start-" + startKey(program)
	err = cache.fillOnce(ctx, entry, waitingFor(report, "Kafka"), func(tmp string) error {
		began := time.Now()
		report(Progress{What: "Kafka", Stage: Preparing, Detail: "first start, once"})
		if err := recordStart(ctx, cache, program, tmp); err != nil {
			return err
		}
		report(Progress{What: "Kafka", Stage: Preparing, Detail: "done", Elapsed: time.Since(began)})
		return nil
	})
	return cache.path(entry), err
}

// startKey returns a hash of everything that an archive of classes depends on: the directory of the jars and the JVM.
// If an archive does not fit in spite of this, the JVM ignores it.
func startKey(program kafkaProgram) string {
	java := program.java
	if real, err := filepath.EvalSymlinks(java); err == nil {
		java = real
	}

	key := java + "\n" + program.libs
	if info, err := os.Stat(java); err == nil {
		key += fmt.Sprintf("\n%d %d", info.Size(), info.ModTime().UnixNano())
	}

	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:4])
}

// recordStart runs a broker once, and writes the files for later starts into tmp.
func recordStart(ctx context.Context, cache cache, program kafkaProgram, tmp string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()

	stack, err := newStack(ctx, cache, "")
	if err != nil {
		return err
	}
	defer stack.Stop()

	options, err := Options{Brokers: 1, Quick: true}.withDefaults()
	if err != nil {
		return err
	}
	nodes, err := stack.planNodes(options)
	if err != nil {
		return err
	}

	n := nodes[0]
	if err := os.Mkdir(n.data, 0o755); err != nil {
		return err
	}
	props := n.data + ".properties"
	if err := writeProps(props, brokerProps(n, nodes, options, nil, n.data)); err != nil {
		return err
	}

	if err := runFormat(ctx, program, options.Kafka, newClusterID(), props, stack.dir); err != nil {
		return err
	}
	records, err := os.ReadFile(firstRecords(program.version, n.data))
	if err != nil {
		return err
	}

	archive := filepath.Join(tmp, archiveFile)
	args := append([]string{"-XX:ArchiveClassesAtExit=" + archive},
		javaArgs(program, quickStart, options.Kafka.HeapMB, "kafka.Kafka", props)...)

	member := &Member{name: "kafka-1", id: 1, addr: loopback(n.ports[Plain]), dir: stack.dir}
	member.launch = func(log *os.File) (instance, error) {
		return startProcess(stack.guard, stack.dir, log, program.java, args)
	}
	member.check = func(ctx context.Context) error { return checkBroker(ctx, member.addr, 1, 1) }
	stack.brokers = append(stack.brokers, member)

	if err := member.Start(); err != nil {
		return err
	}
	if err := member.WaitReady(ctx); err != nil {
		return err
	}
	if err := member.Shutdown(); err != nil {
		return err
	}

	if _, err := os.Stat(archive); err != nil {
		return fmt.Errorf("the JVM created no archive of its classes: %w", err)
	}
	return os.WriteFile(filepath.Join(tmp, checkpointFile), records, 0o644)
}
