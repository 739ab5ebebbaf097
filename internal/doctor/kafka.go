package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// kafkaChecks check the brokers and the transactional id.
type kafkaChecks struct{ *examination }

func (x kafkaChecks) checkKafka(ctx context.Context) finding {
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	err := x.brokers.Diagnose(call)
	if err == nil {
		text := strings.Join(x.cfg.Kafka.Brokers, ",") + " responds"
		if r, known := kafkaService(x.cfg.Kafka.Brokers); known {
			return judge(r.level, r.why, "%s; %s", text, r.name)
		}
		return passed("%s", text)
	}

	// The errors of the brokers are then those of the interruption.
	if call.Err() != nil {
		return failed("correct kafka.brokers, or allow the connection in firewalls and network policies",
			"no broker responds in time at %s", x.brokers)
	}

	said, fixes := splitDiagnoses(err)
	if len(said) == 0 {
		return failed("check kafka in the configuration", "%v", err)
	}
	f := failed(joinLines(fixes, 3), "%s", joinFew(said, 3))
	// A relay that starts does not wait for a problem that only a change of the configuration ends.
	f.lasting = x.isLasting(call, err)
	return f
}

// splitDiagnoses returns the texts and fixes of a joined error of several brokers.
func splitDiagnoses(err error) (said, fixes []string) {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range many.Unwrap() {
			s, f := splitDiagnoses(one)
			said, fixes = append(said, s...), append(fixes, f...)
		}

		slices.Sort(fixes)
		return said, slices.Compact(fixes)
	}

	if d, ok := errors.AsType[*kafkawire.Diagnosis](err); ok {
		return []string{fmt.Sprintf("%s: %s (tried %s)", d.Broker, d.Text, d.Tried)}, []string{d.Fix}
	}
	return nil, nil
}

func (x kafkaChecks) checkBrokers(ctx context.Context) finding {
	layout, err := x.brokers.Metadata(ctx, nil)
	if err != nil {
		return unchecked("", "Kafka returns: %v", err)
	}
	n := len(layout.Brokers)
	x.topics.brokers = n
	if n == 1 {
		return warned("add brokers, up to three, and raise the replication factor of the topics",
			"the cluster has one broker")
	}
	return passed("%d brokers", n)
}

// checkTransactionalID uses an id of the doctor with the prefix that the ACL must allow, because the id
// of the relay is in use. All runs for one watcher share this id, so that ids do not accumulate.
func (x kafkaChecks) checkTransactionalID(ctx context.Context) finding {
	id := "outrelay.doctor." + x.cfg.Watcher
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	err := fence.NewClient(x.brokers).TryTransactionalID(call, id)
	switch {
	case errors.Is(err, fence.ErrIDForbidden):
		return failed(fmt.Sprintf("kafka-acls.sh %s --add --allow-principal %s --operation WRITE --operation DESCRIBE --transactional-id outrelay. --resource-pattern-type prefixed", x.bootstrapFlag(), x.kafkaPrincipal()),
			"missing: WRITE or DESCRIBE on transactional ids that begin with outrelay.")
	case err != nil:
		return failed("check the brokers: the topic __transaction_state needs a leader for each partition, and at least "+
			"min.insync.replicas in-sync replicas", "initializing the transactional id %s failed: %v", id, err)
	}

	return passed("the user may use ids that begin with outrelay.")
}

func (x *examination) bootstrapFlag() string {
	return "--bootstrap-server " + strings.Join(x.cfg.Kafka.Brokers, ",")
}

func (x *examination) kafkaPrincipal() string {
	if s := x.cfg.Kafka.SASL; s != nil && s.Username != "" {
		return "User:" + s.Username
	}
	return "User:<the relay's user>"
}
