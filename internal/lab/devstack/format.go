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
func format(ctx context.Context, p kafkaProgram, k KafkaOptions, cluster string, nodes []node, dir string) error {
	checkpoint := filepath.Join(p.prep, checkpointFile)
	first := 0
	// Passwords of SCRAM users are records of the first node, made by the tool.
	if p.prep == "" || len(k.Users) > 0 {
		if err := runFormat(ctx, p, k, cluster, nodes[0].data+".properties", dir); err != nil {
			return err
		}
		checkpoint, first = firstRecords(p.version, nodes[0].data), 1
	}

	records, err := os.ReadFile(checkpoint)
	if err != nil {
		return err
	}

	for _, n := range nodes[first:] {
		copied := firstRecords(p.version, n.data)
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
func runFormat(ctx context.Context, p kafkaProgram, k KafkaOptions, cluster, props, dir string) error {
	args := []string{"format", "-t", cluster, "-c", props}
	for _, u := range k.Users {
		for _, m := range sasl.With(sasl.Password) {
			if !m.Clear {
				args = append(args, "--add-scram", fmt.Sprintf("%s=[name=%s,password=%s]", m.Listener, u.Name, u.Password))
			}
		}
	}

	cmd := interruptible(ctx, p.java, javaArgs(p, true, 128, "kafka.tools.StorageTool", args...)...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return addLastLine(err, string(out))
	}
	return nil
}

// prepareKafka starts and stops a broker once, and keeps the files that make every later start fast. A start also
// works without them, only slower. So the caller reports the error as progress, and Start does not return it.
func prepareKafka(ctx context.Context, c cache, p kafkaProgram, report func(Progress)) (prep string, err error) {
	entry := "kafka-" + p.version + "-start-" + startKey(p)
	err = c.fillOnce(ctx, entry, waitingFor(report, "Kafka"), func(tmp string) error {
		began := time.Now()
		report(Progress{What: "Kafka", Stage: Preparing, Detail: "first start, once"})
		if err := recordStart(ctx, c, p, tmp); err != nil {
			return err
		}
		report(Progress{What: "Kafka", Stage: Preparing, Detail: "done", Elapsed: time.Since(began)})
		return nil
	})
	return c.path(entry), err
}

// startKey returns a hash of everything that an archive of classes depends on: the directory of the jars and the JVM.
// If an archive does not fit in spite of this, the JVM ignores it.
func startKey(p kafkaProgram) string {
	java := p.java
	if real, err := filepath.EvalSymlinks(java); err == nil {
		java = real
	}

	key := java + "\n" + p.libs
	if info, err := os.Stat(java); err == nil {
		key += fmt.Sprintf("\n%d %d", info.Size(), info.ModTime().UnixNano())
	}

	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:4])
}

// recordStart runs a broker once, and writes the files for later starts into tmp.
func recordStart(ctx context.Context, c cache, p kafkaProgram, tmp string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()

	s, err := newStack(ctx, c, "")
	if err != nil {
		return err
	}
	defer s.Stop()

	o, err := Options{Brokers: 1, Quick: true}.withDefaults()
	if err != nil {
		return err
	}
	nodes, err := s.planNodes(o)
	if err != nil {
		return err
	}

	n := nodes[0]
	if err := os.Mkdir(n.data, 0o755); err != nil {
		return err
	}
	props := n.data + ".properties"
	if err := writeProps(props, brokerProps(n, nodes, o, nil, n.data)); err != nil {
		return err
	}

	if err := runFormat(ctx, p, o.Kafka, newClusterID(), props, s.dir); err != nil {
		return err
	}
	records, err := os.ReadFile(firstRecords(p.version, n.data))
	if err != nil {
		return err
	}

	archive := filepath.Join(tmp, archiveFile)
	args := append([]string{"-XX:ArchiveClassesAtExit=" + archive},
		javaArgs(p, true, o.Kafka.HeapMB, "kafka.Kafka", props)...)

	m := &Member{name: "kafka-1", id: 1, addr: loopback(n.ports[Plain]), dir: s.dir}
	m.launch = func(log *os.File) (instance, error) { return startProcess(s.guard, s.dir, log, p.java, args) }
	m.check = func(ctx context.Context) error { return checkBroker(ctx, m.addr, 1, 1) }
	s.brokers = append(s.brokers, m)

	if err := m.Start(); err != nil {
		return err
	}
	if err := m.WaitReady(ctx); err != nil {
		return err
	}
	if err := m.Shutdown(); err != nil {
		return err
	}

	if _, err := os.Stat(archive); err != nil {
		return fmt.Errorf("the JVM created no archive of its classes: %w", err)
	}
	return os.WriteFile(filepath.Join(tmp, checkpointFile), records, 0o644)
}
