//go:build unix

package fault

import (
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// site is the servers of some eras, and the faults that are possible there.
type site struct {
	name     string
	stack    *devstack.Stack // nil: the shared servers, which no fault may break
	replicas int

	mongo, kafka *toxiproxy.Proxy // between the processes and the servers, or nil

	// forgets is set if the oplog is so small that the history may be lost. Then repeats are flagged, and nothing may clean the outbox.
	forgets bool
	disk    string // the small file system of the servers, or ""

	faults []fault
	left   []fault // in a random order; each comes once before one comes twice
}

// fault breaks something and repairs it.
type fault struct {
	name string
	do   func(*era)
}

// nextFault returns a fault at random.
func (s *site) nextFault(random *rand.Rand) fault {
	if len(s.left) == 0 {
		s.left = append(s.left, s.faults...)
		random.Shuffle(len(s.left), func(i, j int) { s.left[i], s.left[j] = s.left[j], s.left[i] })
	}
	next := s.left[0]
	s.left = s.left[1:]
	return next
}

// mongoURI returns the address of the proxy, or "" if there is none.
func (s *site) mongoURI() string {
	if s.mongo == nil {
		return ""
	}
	return "mongodb://" + s.mongo.Listen + "/?directConnection=true"
}

func countReplicas(stack *devstack.Stack) int {
	if stack == nil {
		return 1
	}
	return len(stack.Kafkas())
}

// newSharedSite returns the servers that all tests share, with a proxy in front of MongoDB.
func newSharedSite(t *testing.T) *site {
	t.Helper()
	direct := options.Client().ApplyURI(stacktest.MongoURI(t))
	return &site{name: "shared", replicas: 1, mongo: newProxy(t, direct.Hosts[0]), faults: append(relayFaults(), mongoNetworkFaults()...)}
}

// newSites returns the servers of a long run: the servers of -fault.site, or all, and the cluster last. They take one place of
// the tests with separate servers.
func newSites(t *testing.T) (sites []*site) {
	t.Helper()
	stacktest.LockMachine(t)
	for _, one := range []struct {
		name  string
		build func(*testing.T) *site
	}{{"shared", newSharedSite}, {"small", newSmallSite}, {"cluster", newClusterSite}} {
		if *soakSite == "" || *soakSite == one.name {
			at := one.build(t)
			at.faults = append(at.faults, longFaultsOfRelays()...)
			sites = append(sites, at)
		}
	}

	if len(sites) == 0 {
		t.Fatalf("-fault.site=%s: pass shared, cluster or small", *soakSite)
	}
	return sites
}

// fastTTL lets MongoDB look for expired documents every second.
func fastTTL() map[string]string { return map[string]string{"ttlMonitorSleepSecs": "1"} }

// newClusterSite starts three members and three brokers, which are killed and frozen.
func newClusterSite(t *testing.T) *site {
	t.Helper()
	stack := startStack(t, devstack.Options{Mongods: 3, Brokers: 3, Quick: true, Mongo: devstack.MongoOptions{Parameters: fastTTL()}})
	return &site{name: "cluster", stack: stack, replicas: 3, faults: append(relayFaults(), clusterFaults()...)}
}

// smallDisk is the size of the file system of newSmallSite.
const smallDisk = 1500 << 20

// newSmallSite starts one member with a small oplog and one broker, behind proxies and on a small disk if this user may mount one.
func newSmallSite(t *testing.T) *site {
	t.Helper()
	disk := mountSmallDisk(t)

	// Clients connect to the address that the broker advertises.
	address, err := devstack.FreeAddress()
	mustSucceed(t, err)
	stack := startStack(t, devstack.Options{
		Mongods: 1, Brokers: 1, Quick: true, Dir: disk,
		// The server truncates the oplog only up to a checkpoint.
		Mongo: devstack.MongoOptions{OplogMB: 4, Args: []string{"--syncdelay", "1"}},
		Kafka: devstack.KafkaOptions{Props: map[string]string{"advertised.listeners": "PLAINTEXT://" + address}},
	})
	at := &site{name: "small", stack: stack, replicas: 1, forgets: true, disk: disk}
	at.mongo, at.kafka = newProxy(t, stack.Mongods()[0].Addr()), newProxyAt(t, address, stack.Kafkas()[0].Addr())
	at.faults = append(append(append(relayFaults(), mongoNetworkFaults()...), kafkaNetworkFaults()...), smallFaults(disk != "")...)
	return at
}

// mountSmallDisk returns the directory of a file system of its own, or "" if this user cannot mount one.
func mountSmallDisk(t *testing.T) string {
	t.Helper()
	image, disk := filepath.Join(t.TempDir(), "image"), t.TempDir()
	mustSucceed(t, os.WriteFile(image, nil, 0o600))
	mustSucceed(t, os.Truncate(image, smallDisk))

	for _, command := range [][]string{{"mkfs.ext4", "-q", "-m", "0", image}, {"mount", "-o", "loop", image, disk}} {
		if out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Logf("no fault fills or slows the disk, because %s failed: %v: %s", command[0], err, out)
			return ""
		}
	}
	t.Cleanup(func() { _ = exec.Command("umount", "-l", disk).Run() })
	return disk
}

// freezeDisk blocks each write to the small disk for a time.
func (s *site) freezeDisk(t *testing.T, wait func()) {
	t.Helper()
	mustRun(t, "fsfreeze", "--freeze", s.disk)
	defer mustRun(t, "fsfreeze", "--unfreeze", s.disk)
	wait()
}

func mustRun(t *testing.T, name string, args ...string) {
	t.Helper()
	// A test that was canceled must not leave its servers blocked.
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}

// startStack starts servers. The place among the tests with separate servers is taken before.
func startStack(t *testing.T, given devstack.Options) *devstack.Stack {
	t.Helper()
	stack, err := devstack.Start(t.Context(), given)
	mustSucceed(t, err)
	t.Cleanup(stack.Stop)
	return stack
}

// fillDisk writes until the small disk is full, and returns the file that has to be removed.
func (s *site) fillDisk(t *testing.T) string {
	t.Helper()
	name := filepath.Join(s.disk, "ballast")
	file, err := os.Create(name)
	mustSucceed(t, err)
	defer file.Close()

	zeros, err := os.Open("/dev/zero")
	mustSucceed(t, err)
	defer zeros.Close()
	if _, err := io.Copy(file, zeros); err == nil {
		t.Fatal("the disk has no end")
	}
	return name
}
