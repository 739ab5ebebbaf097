package kafkalog

import (
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/service/transport"
)

const (
	// replicaTime is how long a replica is used before the leader is asked again, as in the Java client.
	replicaTime = 5 * time.Minute
	// leaderTime is how long the leader is used after a replica failed.
	leaderTime = time.Minute
	// leaderOnly stands for the leader instead of a replica.
	leaderOnly = -1
)

// nearby has the replicas that leaders have named for the rack of this client. It is safe for concurrent use.
type nearby struct {
	mu sync.Mutex
	at map[transport.TopicPartition]choice
}

type choice struct {
	replica int32 // the id of a broker, or leaderOnly
	until   time.Time
}

// find returns the replica to read from, or leaderOnly. It returns false if the leader has to be asked.
func (n *nearby) find(tp transport.TopicPartition) (replica int32, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	choice, ok := n.at[tp]
	return choice.replica, ok && time.Now().Before(choice.until)
}

// set chooses a replica, or leaderOnly, for some time.
func (n *nearby) set(tp transport.TopicPartition, replica int32, duration time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.at == nil {
		n.at = map[transport.TopicPartition]choice{}
	}
	n.at[tp] = choice{replica, time.Now().Add(duration)}
}
