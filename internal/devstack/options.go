package devstack

import (
	"errors"
	"fmt"
	"time"
)

// Options say what to start. A zero count leaves that server out; at least one of the two counts
// must be positive.
type Options struct {
	// Mongods is the number of members of the replica set: 0, 1 or 3.
	Mongods int
	// Brokers is the number of Kafka brokers, each also a controller: 0, 1 or 3.
	Brokers int

	// Env takes the servers that OUTRELAY_TEST_MONGODB_URI and OUTRELAY_TEST_KAFKA name in place of
	// members of the stack's own, where one member was asked for. Such a member can be neither
	// killed nor paused. Defaults to false: the stack owns what it hands out.
	Env bool

	// Quick starts JVMs that are cheap to start and slow at full load: first compiler tier and
	// serial collector. For tests; leave it unset where figures are taken.
	Quick bool

	// Progress is told what happens, from several goroutines but one call at a time. Optional; see
	// [Lines].
	Progress func(Progress)

	// Dir is where the stack makes its data directory. Defaults to a folder of the cache directory.
	Dir string

	Mongo MongoOptions
	Kafka KafkaOptions
}

// MongoOptions tune the mongods.
type MongoOptions struct {
	// Parameters are given as --setParameter; they win over the defaults of the stack.
	Parameters map[string]string
	// OplogMB is the size of the oplog in MiB. 0 leaves it to mongod (5 % of the disk, at least 990).
	OplogMB int
	// CacheMB bounds the WiredTiger cache of each member. Defaults to 256, the least mongod takes.
	CacheMB int
	// ElectionTimeout is how long a set of three waits for a silent primary. Defaults to 2 s
	// (MongoDB's own default is 10 s).
	ElectionTimeout time.Duration
	// TLS has the members take TLS connections beside plain ones. Their certificate is signed by [Stack.CA]; a client
	// that shows one has to show one of the same authority ([Stack.ClientCert]).
	TLS bool
	// Root turns access control on and makes this user, who may do everything; [Stack.MongoURI] logs in as it.
	Root User
	// Args are added to the command line of each member.
	Args []string
}

// KafkaOptions tune the brokers.
type KafkaOptions struct {
	// Props are broker properties; they win over the defaults of the stack.
	Props map[string]string
	// HeapMB bounds the heap of each broker. Defaults to 768, or 384 with Options.Quick.
	HeapMB int
	// Users adds a SASL_PLAINTEXT listener (and SASL_SSL with TLS) on which these users log in by
	// PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512; see [Stack.BrokersOn].
	Users []User
	// TLS adds an SSL listener whose certificate is signed by [Stack.CA]. Client certificates are
	// asked for, not demanded; a client's must be signed by the same authority ([Stack.ClientCert]).
	TLS bool
	// ACLs turns the authorizer on: users may do nothing until an ACL allows it. The plain listener
	// stays a super user's, so a test grants through it.
	ACLs bool
}

// A User logs in to the SASL listeners, or to the replica set.
type User struct{ Name, Password string }

func (o Options) withDefaults() (Options, error) {
	var errs []error
	if n := o.Mongods; n != 0 && n != 1 && n != 3 {
		errs = append(errs, fmt.Errorf("mongods: %d is not 0, 1 or 3", n))
	}
	if n := o.Brokers; n != 0 && n != 1 && n != 3 {
		errs = append(errs, fmt.Errorf("brokers: %d is not 0, 1 or 3", n))
	}
	if o.Mongods == 0 && o.Brokers == 0 {
		errs = append(errs, errors.New("nothing to start: ask for mongods, brokers or both"))
	}
	if r := o.Mongo.Root; r != (User{}) && (!plainName(r.Name) || !plainName(r.Password)) {
		errs = append(errs, errors.New("mongo root: name and password are made of letters, digits, '-', '_' and '.'"))
	}
	for _, u := range o.Kafka.Users {
		if !plainName(u.Name) || !plainName(u.Password) {
			errs = append(errs, errors.New("kafka users: names and passwords are made of letters, digits, '-', '_' and '.'"))
			break
		}
	}
	if err := errors.Join(errs...); err != nil {
		return o, fmt.Errorf("devstack options: %w", err)
	}
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	o.Progress = serially(o.Progress)
	if o.Mongo.CacheMB == 0 {
		o.Mongo.CacheMB = 256
	}
	if o.Mongo.ElectionTimeout == 0 {
		o.Mongo.ElectionTimeout = 2 * time.Second
	}
	if o.Kafka.HeapMB == 0 {
		o.Kafka.HeapMB = 768
		if o.Quick {
			o.Kafka.HeapMB = 384
		}
	}
	return o, nil
}

// plainName reports whether s can stand in a JAAS line and on a command line without quoting.
func plainName(s string) bool {
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.' {
			return false
		}
	}
	return s != ""
}
