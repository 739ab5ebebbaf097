package devstack

import (
	"errors"
	"fmt"
	"time"
)

// Options configure a stack. If a count is zero, the stack has no such server. At least one of the two
// counts must be positive.
type Options struct {
	// Mongods is the number of members of the replica set: 0, 1 or 3.
	Mongods int
	// Brokers is the number of Kafka brokers, each also a controller: 0, 1, 3 or 5.
	Brokers int

	// Env makes the stack use the servers in OUTRELAY_TEST_MONGODB_URI and OUTRELAY_TEST_KAFKA for counts of
	// one. Such members can be neither killed nor paused. Defaults to false: the stack starts its own.
	Env bool

	// Quick makes JVMs start fast but slow at full load: first compiler tier and serial collector. It gives mongod the
	// cache and the settings that many small collections need. Use it for tests, but not for measurements.
	Quick bool

	// Progress is called for each step, from several goroutines but never concurrently. It may be nil; see
	// [Lines].
	Progress func(Progress)

	// Dir is the parent of the stack's data directory. Defaults to a folder of the cache directory.
	Dir string

	Mongo MongoOptions
	Kafka KafkaOptions
}

// MongoOptions tune the mongods.
type MongoOptions struct {
	// Parameters are passed as --setParameter and override the defaults of the stack.
	Parameters map[string]string
	// OplogMB is the size of the oplog in MiB. 0 uses the default of mongod (5 % of the disk, at least 990).
	OplogMB int
	// CacheMB bounds the WiredTiger cache of each member. Defaults to 256, the minimum of mongod, or 1024 with
	// Options.Quick: with 256, the threads that evict pages use a third of the processor time of mongod.
	CacheMB int
	// ElectionTimeout is how long a set of three waits for a silent primary. Defaults to 2 s
	// (MongoDB's own default is 10 s).
	ElectionTimeout time.Duration
	// TLS makes the members accept TLS connections in addition to plain ones. [Stack.CA] signs their
	// certificate. A client certificate is optional, and must be from the same authority ([Stack.ClientCert]).
	TLS bool
	// Root enables access control and creates this user with all privileges. [Stack.MongoURI] uses its login.
	Root User
	// Args are added to the command line of each member.
	Args []string
}

// KafkaOptions tune the brokers.
type KafkaOptions struct {
	// Version is the version of Kafka, 4.0 or later. Defaults to that on the PATH, or else to [KafkaVersion].
	Version string
	// Props are broker properties. They override the defaults of the stack.
	Props map[string]string
	// HeapMB bounds the heap of each broker. Defaults to 768, or 384 with Options.Quick.
	HeapMB int
	// Users adds a SASL_PLAINTEXT listener (and SASL_SSL with TLS) on which these users log in by
	// PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512; see [Stack.BrokersOn].
	Users []User
	// OAuth adds the mechanism for bearer tokens to these listeners. It accepts the tokens of [UnsecuredToken].
	OAuth bool
	// Sessions is how long a login by OAUTHBEARER lasts before the broker closes the connection. 0: it never does.
	Sessions time.Duration
	// TLS adds an SSL listener with a certificate from [Stack.CA]. A client certificate is optional, and must
	// be from the same authority ([Stack.ClientCert]).
	TLS bool
	// ACLs enables the authorizer: a user may do nothing without an ACL. Clients of the plain listener are
	// super users, so a test can create ACLs through it.
	ACLs bool
}

// A User logs in to the SASL listeners, or to the replica set.
type User struct{ Name, Password string }

// withDefaults validates o and returns it with the defaults.
func (o Options) withDefaults() (Options, error) {
	var errs []error
	// Two members have no majority without both of them.
	if n := o.Mongods; n != 0 && n != 1 && n != 3 {
		errs = append(errs, fmt.Errorf("mongods: %d is not 0, 1 or 3", n))
	}
	if n := o.Brokers; n != 0 && n != 1 && n != 3 && n != 5 {
		errs = append(errs, fmt.Errorf("brokers: %d is not 0, 1, 3 or 5", n))
	}
	if o.Mongods == 0 && o.Brokers == 0 {
		errs = append(errs, errors.New("nothing to start: set Mongods, Brokers or both"))
	}

	// Names and passwords are parts of connection strings and of configuration files.
	if user := o.Mongo.Root; user != (User{}) && (!plainName(user.Name) || !plainName(user.Password)) {
		errs = append(errs, errors.New("mongo root: name and password may contain only letters, digits, '-', '_' and '.'"))
	}
	for _, u := range o.Kafka.Users {
		if !plainName(u.Name) || !plainName(u.Password) {
			errs = append(errs,
				errors.New("kafka users: names and passwords may contain only letters, digits, '-', '_' and '.'"))
			break
		}
	}

	if err := errors.Join(errs...); err != nil {
		return o, fmt.Errorf("devstack options: %w", err)
	}

	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	o.Progress = serializeCalls(o.Progress)

	if o.Mongo.CacheMB == 0 {
		o.Mongo.CacheMB = 256
		if o.Quick {
			o.Mongo.CacheMB = 1024
		}
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

// plainName reports whether name needs no quotes in a JAAS line and on a command line.
func plainName(name string) bool {
	for _, r := range name {
		isLetter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		isDigit := r >= '0' && r <= '9'
		if !isLetter && !isDigit && r != '-' && r != '_' && r != '.' {
			return false
		}
	}
	return name != ""
}
