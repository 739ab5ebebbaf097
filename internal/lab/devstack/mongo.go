package devstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
)

// setName is the name of the replica set of a stack.
const setName = "rs0"

// startMongods starts the members, initiates the replica set, and blocks until one member is primary and the others
// are secondaries.
func (s *Stack) startMongods(ctx context.Context, program mongodProgram, options Options) error {
	ports, err := freePorts(options.Mongods)
	if err != nil {
		return err
	}

	for i, port := range ports {
		member := &Member{name: "mongod-" + strconv.Itoa(i+1), id: i + 1, addr: loopback(port), dir: s.dir, ports: []int{port}}
		member.check = func(ctx context.Context) error { return checkServing(ctx, member.addr) }
		if program.image != "" {
			if options.Mongo.secured() {
				return errors.New("mongod in a container supports neither TLS nor access control: install mongod on the PATH")
			}
			command := append([]string{"mongod"}, mongodArgs(options, port, "", "0.0.0.0")...)
			member.launch = s.containerLaunch(member, program.image, nil, command)
		} else {
			data := filepath.Join(s.dir, member.name)
			if err := os.Mkdir(data, 0o755); err != nil {
				return err
			}

			args := append(mongodArgs(options, port, data, "127.0.0.1"), "--nounixsocket")
			security, err := s.mongodSecurity(options.Mongo)
			if err != nil {
				return err
			}
			args = append(args, security...)
			member.launch = func(log *os.File) (instance, error) { return startProcess(s.guard, s.dir, log, program.path, args) }
		}
		s.mongods = append(s.mongods, member)
	}

	for _, m := range s.mongods {
		if err := m.Start(); err != nil {
			return err
		}
	}

	// The set can be initiated when all members respond.
	for _, m := range s.mongods {
		responds := func(ctx context.Context) error {
			_, err := runHello(ctx, m.addr)
			return err
		}
		if err := m.awaitReady(ctx, responds); err != nil {
			return err
		}
	}

	if err := initiateSet(ctx, s.mongods, options.Mongo.ElectionTimeout); err != nil {
		return fmt.Errorf("initiating the replica set: %w", err)
	}
	for _, m := range s.mongods {
		if err := m.WaitReady(ctx); err != nil {
			return err
		}
	}

	// The first user can be created only on the primary, and from this machine.
	primary, err := s.Primary(ctx)
	if err != nil || options.Mongo.Root == (User{}) {
		return err
	}
	s.root = options.Mongo.Root
	return createRoot(ctx, primary.addr, s.root)
}

// quickEngine lets only checkpoints write pages as long as the cache has room, and closes the files of unused collections once a minute.
// With the defaults of mongod, the threads for this walk through the files of thousands of small collections, which takes a sixth of the
// processor time of a mongod that all tests share. Without closing, it ends at the limit of open files after some runs of all tests.
const quickEngine = "eviction=(threads_min=1,threads_max=1),eviction_target=90,eviction_trigger=97," +
	"eviction_dirty_target=70,eviction_dirty_trigger=85,eviction_updates_target=70,eviction_updates_trigger=85," +
	"file_manager=(close_scan_interval=60,close_idle_time=60)"

// mongodArgs returns the arguments of a mongod. data is empty for a container.
func mongodArgs(options Options, port int, data, bind string) []string {
	// Tests use fail points, and no test reads diagnostic data.
	params := map[string]string{
		"enableTestCommands":              "1",
		"diagnosticDataCollectionEnabled": "false",
	}
	for k, v := range options.Mongo.Parameters {
		params[k] = v
	}

	args := []string{
		"--replSet", setName, "--port", strconv.Itoa(port), "--bind_ip", bind,
		"--wiredTigerCacheSizeGB", strconv.FormatFloat(float64(options.Mongo.CacheMB)/1024, 'f', 3, 64),
	}

	if data != "" {
		args = append(args, "--dbpath", data)
	}
	if options.Quick {
		args = append(args, "--wiredTigerEngineConfigString", quickEngine)
	}
	if options.Mongo.OplogMB > 0 {
		args = append(args, "--oplogSize", strconv.Itoa(options.Mongo.OplogMB))
	}

	for _, k := range sortedKeys(params) {
		args = append(args, "--setParameter", k+"="+params[k])
	}
	return append(args, options.Mongo.Args...)
}

func initiateSet(ctx context.Context, members []*Member, election time.Duration) error {
	list := bson.A{}
	for i, m := range members {
		list = append(list, bson.M{"_id": i, "host": m.addr, "priority": 1})
	}

	config := bson.M{"_id": setName, "members": list, "settings": bson.M{
		"electionTimeoutMillis":   election.Milliseconds(),
		"heartbeatIntervalMillis": min(500, election.Milliseconds()/2),
	}}

	_, err := runCommand(ctx, members[0].addr, bson.D{{Key: "replSetInitiate", Value: config}})
	return err
}

// Primary blocks until a member of the replica set accepts writes, and returns it. If two members report to be
// primary, it returns the one that was elected last.
func (s *Stack) Primary(ctx context.Context) (*Member, error) {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for {
		if member := s.primaryNow(ctx); member != nil {
			return member, nil
		}

		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for a primary: %w", context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// primaryNow returns the current primary, or nil if there is none.
func (s *Stack) primaryNow(ctx context.Context) *Member {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()

	elected := make([]bson.ObjectID, len(s.mongods))
	var wg sync.WaitGroup
	for i, m := range s.mongods {
		wg.Go(func() {
			if response, err := runHello(ctx, m.addr); err == nil && response.Primary {
				elected[i] = response.ElectionID
			}
		})
	}
	wg.Wait()

	// An election id grows with each election, so a deposed primary has a lower id.
	var last bson.ObjectID
	var primary *Member
	for i, id := range elected {
		if id.Hex() > last.Hex() {
			last, primary = id, s.mongods[i]
		}
	}
	return primary
}

type helloResponse struct {
	Primary    bool          `bson:"isWritablePrimary"`
	Secondary  bool          `bson:"secondary"`
	ElectionID bson.ObjectID `bson:"electionId"`
}

func runHello(ctx context.Context, addr string) (helloResponse, error) {
	var response helloResponse
	raw, err := runCommand(ctx, addr, bson.D{{Key: "hello", Value: 1}})
	if err == nil {
		err = bson.Unmarshal(raw, &response)
	}
	return response, err
}

// checkServing returns nil if the mongod is primary or secondary.
func checkServing(ctx context.Context, addr string) error {
	response, err := runHello(ctx, addr)
	if err == nil && !response.Primary && !response.Secondary {
		err = errors.New("neither primary nor secondary yet")
	}
	return err
}

// runCommand runs one command on the member at addr.
func runCommand(ctx context.Context, addr string, cmd bson.D) (bson.Raw, error) {
	// If no process listens, the driver would wait for its own timeout. A rejected dial fails at once.
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	_ = conn.Close()

	client, err := mongo.Connect(options.Client().SetHosts([]string{addr}).SetDirect(true).SetAppName("devstack").
		SetServerSelectionTimeout(5 * time.Second).SetReadPreference(readpref.Nearest()))
	if err != nil {
		return nil, err
	}
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()
	return client.Database("admin").RunCommand(ctx, cmd).Raw()
}

// useMongo uses the replica set named by the environment.
func (s *Stack) useMongo(ctx context.Context, uri string) error {
	opts := options.Client().ApplyURI(uri)
	if err := opts.Validate(); err != nil {
		return fmt.Errorf("%s: %w", EnvMongoDB, err)
	}

	for i, host := range opts.Hosts {
		member := &Member{name: "mongod-" + strconv.Itoa(i+1), id: i + 1, addr: host}
		// The driver checks the servers together: this shows which of them is away.
		member.check = func(ctx context.Context) error {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", member.addr)
			if err == nil {
				err = conn.Close()
			}
			return err
		}
		s.mongods = append(s.mongods, member)
	}

	s.uri = uri
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	client, err := mongo.Connect(opts)
	if err != nil {
		return fmt.Errorf("%s: %w", EnvMongoDB, err)
	}
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()

	var info struct {
		Version string `bson:"version"`
	}
	if err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "buildInfo", Value: 1}}).Decode(&info); err != nil {
		return fmt.Errorf("%s names a server that does not respond: %w", EnvMongoDB, err)
	}

	s.facts.mongo.Version = info.Version
	return nil
}

// MongoURI returns the connection string of the replica set, or "" if there is none.
func (s *Stack) MongoURI() string {
	if s.uri != "" || len(s.mongods) == 0 {
		return s.uri
	}
	if s.root != (User{}) {
		return s.MongoURIAs(s.root)
	}
	return "mongodb://" + strings.Join(memberAddrs(s.mongods), ",") + "/?replicaSet=" + setName
}

// MongoURIAs returns the connection string for a user of the admin database.
func (s *Stack) MongoURIAs(user User) string {
	return "mongodb://" + user.Name + ":" + user.Password + "@" + strings.Join(memberAddrs(s.mongods), ",") +
		"/?authSource=admin&replicaSet=" + setName
}
